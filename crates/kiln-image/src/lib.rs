//! Pictures in and out: any file to RGB, RGB to what the model wants, and back into a file with its recipe inside.
//!
//! Everything is done as Pillow and diffusers do it, because the model's answer depends on it: resizing is equal
//! to Pillow's to the byte, and preparing references, inpainting sources and masks follows the FLUX.2 \[klein\]
//! pipelines.
//!
//! ```
//! use kiln_image::{Filter, Format, Picture, encode, from_bytes, prepare_reference, read_recipe, resize};
//!
//! let picture = Picture::new(2, 1, vec![255, 0, 0, 0, 0, 255])?;
//! let large = resize(&picture, 100, 90, Filter::Lanczos);
//!
//! let file = encode(&large, Format::Png, Some(r#"{"seed":42}"#))?;
//! assert_eq!(from_bytes("large.png", &file)?, large);
//! assert_eq!(read_recipe(&file)?.as_deref(), Some(r#"{"seed":42}"#));
//!
//! let reference = prepare_reference(&large)?;
//! assert_eq!((reference.width(), reference.height()), (96, 80));
//! # Ok::<(), kiln_image::Error>(())
//! ```
#![forbid(unsafe_code)]

mod counters;
mod decode;
mod deflate;
mod encode;
mod error;
mod exif;
mod huffman;
mod inpaint;
mod jpeg;
mod overlay;
mod prepare;
mod raster;
mod recipe;
mod resample;
mod strips;
mod values;
mod write;

pub use counters::{Counters, counters};
pub use decode::{MAX_BYTES, MAX_SIDE, dimensions, from_bytes, open, open_gray, with_transparency};
pub use encode::{Encoding, Format, encode, encode_as};
pub use error::{Error, Result};
pub use inpaint::{Inpaint, Paste, Region, prepare_inpaint};
pub use overlay::paste_back;
pub use prepare::{MULTIPLE, init_size, prepare_init, prepare_reference, shrink_to};
pub use raster::{GrayPicture, Picture, Raster};
pub use recipe::read_recipe;
pub use resample::{Filter, resize};
pub use values::{from_signed_f32, from_unit_f32, to_signed_f32, to_unit_f32};
pub use write::write_atomic;
