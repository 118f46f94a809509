//! Results: pixels, recipes, and image files.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{Embedded, GeneratedImage, Payload, Recipe};
use kiln_image::{Encoding, Format};

use crate::abi::{self, SizedStruct};
use crate::handles::Table;
use crate::signer::{KilnSigner, SIGNERS};
use crate::status::{Failure, KilnStatus, guard};

pub(crate) static IMAGES: Table<Vec<ResultImage>> = Table::new("kiln_images");

/// The images of a call.
pub struct KilnImages(());

/// An image. What it points to is valid until kiln_images_free.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnImage {
    /// sizeof(kiln_image).
    pub size: usize,
    /// RGB, 8 bits each, rows from the top without padding: 3 * width * height bytes.
    pub rgb: *const u8,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Its seed, if has_seed is set.
    pub seed: u64,
    /// 1: the noise was drawn from `seed`.
    pub has_seed: u8,
    /// Steps that were computed in full.
    pub computed_steps: u32,
    /// Steps that reused the step cache.
    pub reused_steps: u32,
    /// How it was generated, as JSON.
    pub recipe: *const c_char,
}

// SAFETY: `repr(C)`, the size is first, and numbers and pointers may be zero.
unsafe impl SizedStruct for KilnImage {
    const NAME: &'static str = "kiln_image";
}

/// Bytes that the library allocated. Free them with kiln_buffer_free.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnBuffer {
    /// The bytes; NULL if there are none.
    pub data: *mut u8,
    /// Their number.
    pub length: usize,
}

impl KilnBuffer {
    pub(crate) const NONE: KilnBuffer = KilnBuffer { data: std::ptr::null_mut(), length: 0 };
}

impl From<Vec<u8>> for KilnBuffer {
    fn from(bytes: Vec<u8>) -> KilnBuffer {
        let bytes = bytes.into_boxed_slice();
        let length = bytes.len();
        KilnBuffer { data: Box::into_raw(bytes).cast(), length }
    }
}

/// What an image file gets besides its pixels. All zero but the size are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnFileOptions {
    /// sizeof(kiln_file_options).
    pub size: usize,
    /// Who signs the file (C2PA), so that two runs give different bytes; NULL: nobody.
    pub signer: *const KilnSigner,
    /// The invisible watermark in the file's pixels: 8 hexadecimal digits, such as "4b494c4e" for Kiln's own; NULL: none.
    pub watermark: *const c_char,
    /// 1 to 100, for JPEG and WebP; 0: 95 for JPEG, lossless for WebP.
    pub quality: u8,
    /// 1: without the recipe (prompt, seed, ...).
    pub no_recipe: u8,
    /// 1: without the mark that a model made the image; laws may ask for it.
    pub no_ai_mark: u8,
}

// SAFETY: `repr(C)`, the size is first, and numbers and pointers may be zero.
unsafe impl SizedStruct for KilnFileOptions {
    const NAME: &'static str = "kiln_file_options";
}

/// An image with its recipe as a text for the caller.
pub(crate) struct ResultImage {
    image: GeneratedImage,
    json: CString,
}

impl From<GeneratedImage> for ResultImage {
    fn from(image: GeneratedImage) -> ResultImage {
        // JSON escapes NUL.
        let json = CString::new(image.recipe.to_json()).unwrap_or_default();
        ResultImage { image, json }
    }
}

impl ResultImage {
    /// Encodes the image with this recipe.
    ///
    /// # Safety
    /// `options` is as the header says.
    unsafe fn encode(
        &self,
        recipe: &Recipe,
        format: Format,
        options: *const KilnFileOptions,
    ) -> Result<Vec<u8>, Failure> {
        let (mut encoding, mut embedded) = (Encoding::from(format), Embedded::default());
        // SAFETY: promised by the caller.
        if let Some(options) = unsafe { abi::read(options)? } {
            if options.quality > 100 {
                return Err(Failure::invalid(format!("the quality is {}, not 0 to 100", options.quality)));
            }
            // SAFETY: as above.
            let watermark = unsafe { abi::name(options.watermark, "watermark")? };
            let watermark = watermark.map(|digits| digits.parse::<Payload>()).transpose();
            encoding.quality = Some(options.quality).filter(|quality| *quality > 0);
            embedded.recipe = options.no_recipe == 0;
            embedded.ai_mark = options.no_ai_mark == 0;
            embedded.watermark = watermark.map_err(Failure::invalid)?;
            if !options.signer.is_null() {
                embedded.credentials = Some(SIGNERS.get(options.signer)?);
            }
        }
        Ok(recipe.encode(&self.image.image, encoding, &embedded)?)
    }
}

/// Returns an image of a call.
fn get(images: *const KilnImages, index: usize) -> Result<(Arc<Vec<ResultImage>>, usize), Failure> {
    let images = IMAGES.get(images)?;
    if index >= images.len() {
        let count = images.len();
        return Err(Failure::invalid(format!("there is no image {index}; there are {count}, from 0")));
    }
    Ok((images, index))
}

/// Returns the number of images; 0 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_images_count(images: *const KilnImages) -> usize {
    let mut count = 0;
    guard(|| {
        count = IMAGES.get(images)?.len();
        Ok(())
    });
    count
}

/// Describes an image by its index, from 0. Set `image->size` before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_images_get(
    images: *const KilnImages,
    index: usize,
    image: *mut KilnImage,
) -> KilnStatus {
    guard(|| {
        let (all, index) = get(images, index)?;
        let ResultImage { image: generated, json } = &all[index];
        let described = KilnImage {
            size: size_of::<KilnImage>(),
            rgb: generated.image.pixels().as_ptr(),
            width: generated.image.width(),
            height: generated.image.height(),
            seed: generated.seed.unwrap_or_default(),
            has_seed: generated.seed.is_some().into(),
            computed_steps: generated.steps.computed as u32,
            reused_steps: generated.steps.reused as u32,
            recipe: json.as_ptr(),
        };
        // SAFETY: the argument is as the header says.
        unsafe { abi::write(image, &described) }
    })
}

/// Encodes an image as a PNG file with its recipe, the bytes of `kiln generate --absolute-paths`. Free them with
/// kiln_buffer_free; after an error there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_image_png(
    images: *const KilnImages,
    index: usize,
    buffer: *mut KilnBuffer,
) -> KilnStatus {
    // SAFETY: arguments as the header says.
    unsafe { kiln_image_png_with(images, index, std::ptr::null(), buffer) }
}

/// Like kiln_image_png, with options for the file. `options`: NULL are the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_image_png_with(
    images: *const KilnImages,
    index: usize,
    options: *const KilnFileOptions,
    buffer: *mut KilnBuffer,
) -> KilnStatus {
    guard(|| {
        if buffer.is_null() {
            return Err(Failure::invalid("the kiln_buffer is NULL"));
        }
        // SAFETY: not NULL, and the caller's to write.
        unsafe { *buffer = KilnBuffer::NONE };
        let (all, index) = get(images, index)?;
        let image = &all[index];
        // SAFETY: the argument is as the header says.
        let bytes = unsafe { image.encode(&image.image.recipe, Format::Png, options)? };
        // SAFETY: as above.
        unsafe { *buffer = bytes.into() };
        Ok(())
    })
}

/// Writes an image to a file, whole or not at all: .png, .jpg or .webp, with the bytes of `kiln generate -o`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_image_save(
    images: *const KilnImages,
    index: usize,
    path: *const c_char,
) -> KilnStatus {
    // SAFETY: arguments as the header says.
    unsafe { kiln_image_save_with(images, index, path, std::ptr::null()) }
}

/// Like kiln_image_save, with options for the file. `options`: NULL are the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_image_save_with(
    images: *const KilnImages,
    index: usize,
    path: *const c_char,
    options: *const KilnFileOptions,
) -> KilnStatus {
    guard(|| {
        // SAFETY: the argument is as the header says.
        let path = unsafe { abi::name(path, "path")? };
        let path = PathBuf::from(path.ok_or_else(|| Failure::invalid("the path is NULL or empty"))?);
        let (all, index) = get(images, index)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let recipe = all[index].image.recipe.clone().relative_to(folder);
        // SAFETY: as above.
        let bytes = unsafe { all[index].encode(&recipe, Format::from_path(&path)?, options)? };
        Ok(kiln_image::write_file(&path, &bytes)?)
    })
}

/// Frees bytes and sets them to NULL, so that freeing them again does nothing. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_buffer_free(buffer: *mut KilnBuffer) {
    guard(|| {
        if buffer.is_null() {
            return Ok(());
        }
        // SAFETY: not NULL, and the caller's to read and write.
        let KilnBuffer { data, length } = unsafe { buffer.replace(KilnBuffer::NONE) };
        if !data.is_null() {
            // SAFETY: they were a boxed slice of this length.
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(data, length)) });
        }
        Ok(())
    });
}

/// Frees the images of a call, and what kiln_images_get points to; NULL is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_images_free(images: *mut KilnImages) -> KilnStatus {
    guard(|| IMAGES.remove(images))
}
