//! Image input and output: decoding files to RGB, preparing model inputs, and encoding files with an embedded recipe.
//!
//! Everything matches Pillow and diffusers, because the model's output depends on it: resizing is byte-exact with
//! Pillow, and reference images, inpainting sources and masks are prepared as in diffusers' FLUX.2 \[klein\]
//! pipelines.
//!
//! ```
//! use kiln_image::{Filter, Format, RgbImage, encode, from_bytes, prepare_reference, read_recipe, resize};
//!
//! let image = RgbImage::new(2, 1, vec![255, 0, 0, 0, 0, 255])?;
//! let large = resize(&image, 100, 90, Filter::Lanczos);
//!
//! let file = encode(&large, Format::Png, Some(r#"{"seed":42}"#))?;
//! assert_eq!(from_bytes("large.png", &file)?, large);
//! assert_eq!(read_recipe(&file)?.as_deref(), Some(r#"{"seed":42}"#));
//!
//! let reference = prepare_reference(&large, 16)?;
//! assert_eq!((reference.width(), reference.height()), (96, 80));
//! # Ok::<(), kiln_image::Error>(())
//! ```
#![forbid(unsafe_code)]

mod ai_mark;
mod bits;
mod block_watermark;
mod counters;
mod decode;
mod deflate;
mod encode;
mod error;
mod exif;
mod format;
mod header;
mod huffman;
mod inpaint;
mod jpeg;
mod jpeg_blocks;
mod jpeg_codes;
mod jpeg_strips;
mod limits;
mod luma_pattern;
mod manifest_store;
mod overlay;
mod png_chunks;
mod png_strips;
mod prepare;
mod raster;
mod recipe;
mod resample;
mod tiles;
mod values;
mod webp;
mod webp_predict;
mod webp_strips;
mod write;

pub use ai_mark::{AiMark, AiSource, FoundAiMark, read_ai_mark};
pub use block_watermark::block_watermark_agreement;
pub use counters::{Counters, counters};
pub use decode::{decoding_bytes, dimensions, from_bytes, from_bytes_with_mask, open, open_gray};
pub use encode::{Encoding, Metadata, encode, encode_with, encode_with_metadata};
pub use error::{Error, Result};
pub use format::Format;
pub use inpaint::{InpaintInputs, PasteTarget, Region, prepare_inpaint, prepare_inpaint_sized};
pub use limits::{MAX_BYTES, MAX_SIDE};
pub use luma_pattern::{add_pattern, small_luma, window_means};
pub use manifest_store::{ManifestPlace, read_manifest_store, with_manifest_store};
pub use overlay::paste_back;
pub use prepare::{init_size, prepare_init, prepare_reference, prepare_reference_within, shrink_to};
pub use raster::{GrayImage, Raster, RgbImage};
pub use recipe::{read_parameters, read_recipe};
pub use resample::{Filter, resize};
pub use tiles::{Tile, TileGrid, enlarge, match_tones, overview, tile_starts};
pub use values::{from_signed_f32, from_unit_f32, to_signed_f32, to_unit_f32};
pub use write::write_file;
