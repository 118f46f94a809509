//! Requests: the structure of the header becomes a `Request` of the engine, pixels in memory become its input images.

use std::collections::HashMap;
use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{
    DoraRuleName, FileRef, InputImage, InputResolver, InputTensors, LocalFiles, LoraRef, Request,
};
use kiln_image::RgbImage;

use crate::abi::{self, SizedStruct};
use crate::status::Failure;

/// An input image: a file, or pixels in memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnInput {
    /// sizeof(kiln_input).
    pub size: usize,
    /// An image file (PNG, JPEG, WebP, GIF, BMP, TIFF); NULL: the pixels below.
    pub path: *const c_char,
    /// RGB, 8 bits each, rows from the top; copied before the call returns.
    pub rgb: *const u8,
    /// Width of the pixels.
    pub width: u32,
    /// Height of the pixels.
    pub height: u32,
    /// Bytes from one row of pixels to the next; 0: 3 * width.
    pub stride: usize,
}

/// A LoRA and its weight.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnLora {
    /// sizeof(kiln_lora).
    pub size: usize,
    /// Its file, or the folder that PEFT saved it to.
    pub path: *const c_char,
    /// Its weight, may be negative; 0: 1, unless has_weight is set.
    pub weight: f32,
    /// 1: `weight` is set, also if it is 0.
    pub has_weight: u8,
}

/// What to generate. Only the prompt is required: zero is the default of everything else. Where zero is also a value, a flag
/// says that it is meant.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnRequest {
    /// sizeof(kiln_request).
    pub size: usize,
    /// Description of the image.
    pub prompt: *const c_char,
    /// What to avoid, on models with guidance; NULL: nothing.
    pub negative_prompt: *const c_char,
    /// Width in pixels, rounded down to a multiple of 16; 0: the first reference's, else the model's.
    pub width: u32,
    /// Height in pixels, as the width.
    pub height: u32,
    /// Number of denoising steps; 0: the model's, 4 if distilled.
    pub steps: u32,
    /// Number of images; 0: 1. Image i has seed + i.
    pub n: u32,
    /// Seed; 0: random, unless has_seed is set.
    pub seed: u64,
    /// 1: `seed` is set, also if it is 0.
    pub has_seed: u8,
    /// 1: `mask_padding` is set, also if it is 0.
    pub has_mask_padding: u8,
    /// 1: `guidance` is set, also if it is 0.
    pub has_guidance: u8,
    /// 1: `strength` is set, also if it is 0.
    pub has_strength: u8,
    /// 1: skip what a LoRA has for layers that the model lacks.
    pub lora_partial: u8,
    /// 1: draw the noise of all images with one generator, as diffusers does.
    pub one_generator: u8,
    /// Guidance scale, on models with guidance; 0: the model's, unless has_guidance is set.
    pub guidance: f32,
    /// How much to change the initial image, up to 1 (ignore it); 0: 0.6, with a mask 0.8, to upscale 0.35, unless has_strength
    /// is set.
    pub strength: f32,
    /// Threshold of the step cache, up to 1; 0: off.
    pub cache: f32,
    /// Generate only the masked region with this many pixels around it; 0: the whole image, unless has_mask_padding is set.
    pub mask_padding: u32,
    /// Number of tokens that the prompt is padded or truncated to; 0: the model's.
    pub max_tokens: u32,
    /// Enlarge the initial image by 2 or 4 instead of generating a new one; 0: off.
    pub upscale: u32,
    /// Reference images, to edit or combine as the prompt says; NULL: none.
    pub references: *const KilnInput,
    /// Number of reference images.
    pub reference_count: usize,
    /// Initial image, to start from instead of noise alone; NULL: none.
    pub init: *const KilnInput,
    /// Mask for the initial image: white areas are regenerated, black areas stay; NULL: none.
    pub mask: *const KilnInput,
    /// LoRAs; NULL: none.
    pub loras: *const KilnLora,
    /// Number of LoRAs.
    pub lora_count: usize,
    /// A VAE to use instead of the model's; NULL: the model's.
    pub vae: *const c_char,
    /// What a weight other than 1 means for a DoRA: "comfyui" or "diffusers"; NULL: comfyui.
    pub dora_rule: *const c_char,
    /// Any other field, as an object in the JSON of `/v1/jobs`; what it holds replaces what is above. NULL: none.
    pub json: *const c_char,
}

// SAFETY: `repr(C)`, the size is first, and numbers and pointers may be zero.
unsafe impl SizedStruct for KilnInput {
    const NAME: &'static str = "kiln_input";
}

// SAFETY: as above.
unsafe impl SizedStruct for KilnLora {
    const NAME: &'static str = "kiln_lora";
}

// SAFETY: as above.
unsafe impl SizedStruct for KilnRequest {
    const NAME: &'static str = "kiln_request";
}

/// Input images in memory by the names that the request has for them; other names are paths.
#[derive(Default)]
pub(crate) struct Inputs {
    images: HashMap<PathBuf, InputImage>,
}

impl Inputs {
    /// Adds an input and returns its name in the request.
    ///
    /// # Safety
    /// Its path or pixels are as the header says.
    unsafe fn add(&mut self, input: &KilnInput, role: &str) -> Result<FileRef, Failure> {
        // SAFETY: promised by the caller.
        match (unsafe { abi::name(input.path, role)? }, input.rgb.is_null()) {
            (Some(path), true) => return Ok(path.into()),
            (None, false) => {}
            (Some(_), false) => {
                return Err(Failure::invalid(format!(
                    "the {role} has a path and pixels, expected one of them"
                )));
            }
            (None, true) => {
                return Err(Failure::invalid(format!("the {role} has neither a path nor pixels")));
            }
        }
        // SAFETY: promised by the caller.
        let image = unsafe { pixels(input, role)? };
        Ok(self.insert(image))
    }

    fn insert(&mut self, image: RgbImage) -> FileRef {
        let file = FileRef::from(format!("input:{}", self.images.len()));
        self.images.insert(file.path.clone(), InputImage { image: Arc::new(image), file: file.clone() });
        file
    }

    /// Reads inputs that a request in JSON calls `input:0`, `input:1`, ….
    ///
    /// # Safety
    /// The array is as the header says.
    pub unsafe fn read(inputs: *const KilnInput, count: usize) -> Result<Inputs, Failure> {
        let mut all = Inputs::default();
        // SAFETY: promised by the caller.
        for (i, input) in unsafe { abi::read_all(inputs, count)? }.iter().enumerate() {
            let role = format!("input {i}");
            // SAFETY: promised by the caller.
            let path = unsafe { abi::name(input.path, &role)? };
            let image = match path.filter(|_| input.rgb.is_null()) {
                Some(path) => {
                    let image = LocalFiles.image(Path::new(&path))?;
                    RgbImage::clone(&image.image)
                }
                // SAFETY: promised by the caller.
                None => unsafe { pixels(input, &role)? },
            };
            all.insert(image);
        }
        Ok(all)
    }
}

/// Copies the pixels of an input.
///
/// # Safety
/// As many pixels are readable as the width, height and stride say.
unsafe fn pixels(input: &KilnInput, role: &str) -> Result<RgbImage, Failure> {
    let KilnInput { rgb, width, height, stride, .. } = *input;
    if rgb.is_null() {
        return Err(Failure::invalid(format!("the {role} has neither a path nor pixels")));
    }
    let row = width as usize * 3;
    let stride = if stride == 0 { row } else { stride };
    let bytes =
        stride.checked_mul(height as usize).filter(|bytes| *bytes <= kiln_image::MAX_BYTES as usize * 4);
    if width == 0 || height == 0 || stride < row || bytes.is_none() {
        let what = format!("the {role} has {width}×{height} pixels with rows of {stride} bytes");
        return Err(Failure::invalid(what).hint("give width, height and stride of the pixels in memory"));
    }
    let mut copy = Vec::with_capacity(row * height as usize);
    for y in 0..height as usize {
        // SAFETY: the caller promises `height` rows of `stride` bytes; the last one need not be padded.
        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(rgb.add(y * stride), row) });
    }
    Ok(RgbImage::new(width, height, copy)?)
}

impl InputResolver for Inputs {
    fn image(&self, name: &Path) -> kiln_engine::Result<InputImage> {
        self.images.get(name).cloned().map_or_else(|| LocalFiles.image(name), Ok)
    }

    fn lora(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        LocalFiles.lora(name)
    }

    fn vae(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        LocalFiles.vae(name)
    }

    fn tensors(&self, name: &Path) -> kiln_engine::Result<InputTensors> {
        LocalFiles.tensors(name)
    }
}

/// Reads a request and its images.
///
/// # Safety
/// `request` and what it points to are as the header says.
pub(crate) unsafe fn read(request: *const KilnRequest) -> Result<(Request, Inputs), Failure> {
    // SAFETY: promised by the caller.
    let Some(given) = (unsafe { abi::read(request)? }) else {
        return Err(Failure::invalid("the kiln_request is NULL"));
    };
    let mut inputs = Inputs::default();
    // SAFETY: promised by the caller.
    let references = unsafe { abi::read_all(given.references, given.reference_count)? };
    // SAFETY: promised by the caller.
    let references = references.iter().map(|input| unsafe { inputs.add(input, "reference image") });
    let references = references.collect::<Result<_, _>>()?;
    let mut one = |input: *const KilnInput, role: &str| {
        // SAFETY: promised by the caller.
        let input = unsafe { abi::read(input)? };
        // SAFETY: promised by the caller.
        input.map(|input| unsafe { inputs.add(&input, role) }).transpose()
    };
    let (init, mask) = (one(given.init, "initial image")?, one(given.mask, "mask")?);
    // SAFETY: promised by the caller.
    let loras = unsafe { abi::read_all(given.loras, given.lora_count)? };
    // SAFETY: promised by the caller.
    let loras = loras.iter().map(|lora| unsafe { read_lora(lora) }).collect::<Result<_, _>>()?;
    // SAFETY: promised by the caller.
    let (prompt, negative, vae, dora_rule, json) = unsafe {
        (
            abi::text(given.prompt, "prompt")?,
            abi::name(given.negative_prompt, "negative prompt")?,
            abi::name(given.vae, "vae")?,
            abi::name(given.dora_rule, "dora_rule")?,
            abi::text(given.json, "json")?,
        )
    };
    let dora_rule = match dora_rule.as_deref() {
        None => None,
        Some("comfyui") => Some(DoraRuleName::ComfyUi),
        Some("diffusers") => Some(DoraRuleName::Diffusers),
        Some(other) => {
            let what = format!("the dora_rule is `{other}`, expected `comfyui` or `diffusers`");
            return Err(Failure::invalid(what));
        }
    };
    let count = |number| given_or_flagged(number, 0);
    let request = Request {
        prompts: prompt.into_iter().collect(),
        negative_prompts: negative.into_iter().collect(),
        loras,
        lora_partial: given.lora_partial != 0,
        dora_rule,
        vae: vae.map(FileRef::from),
        width: count(given.width),
        height: count(given.height),
        n: count(given.n),
        seed: given_or_flagged(given.seed, given.has_seed).into_iter().collect(),
        one_generator: given.one_generator != 0,
        max_tokens: count(given.max_tokens),
        references,
        init,
        mask,
        // 0.6 and not 0.6000000238: the nearest short number, as it would be typed.
        strength: given_or_flagged(given.strength, given.has_strength)
            .map(|strength| strength.to_string().parse().unwrap_or(strength.into())),
        mask_padding: given_or_flagged(given.mask_padding, given.has_mask_padding),
        upscale: count(given.upscale),
        steps: count(given.steps),
        guidance: given_or_flagged(given.guidance, given.has_guidance),
        cache: given_or_flagged(given.cache, 0),
        ..Request::default()
    };
    match json {
        None => Ok((request, inputs)),
        Some(json) => Ok((with_json(&request, &json)?, inputs)),
    }
}

/// Returns a request with the fields of an object in JSON.
pub(crate) fn with_json(request: &Request, json: &str) -> Result<Request, Failure> {
    if let Some((field, found)) = request.not_finite() {
        return Err(Failure::invalid(format!("`{field}` must be a finite number, found {found}")));
    }
    let invalid = |error| Failure::invalid(format!("the JSON is not a request: {error}"));
    let changed = request.with_fields(serde_json::from_str(json).map_err(invalid)?).map_err(invalid)?;
    if changed.model.is_some() {
        return Err(Failure::invalid("the request names a model, expected none")
            .hint("open the model with kiln_model_open"));
    }
    Ok(changed)
}

/// A number that is not zero, or whose flag says that zero is meant.
fn given_or_flagged<T: Default + PartialEq>(number: T, flag: u8) -> Option<T> {
    (flag != 0 || number != T::default()).then_some(number)
}

/// # Safety
/// The path is NULL or ends in NUL.
unsafe fn read_lora(lora: &KilnLora) -> Result<LoraRef, Failure> {
    // SAFETY: promised by the caller.
    let path = unsafe { abi::name(lora.path, "LoRA")? };
    let path = path.ok_or_else(|| Failure::invalid("a kiln_lora has no path"))?;
    let weight = given_or_flagged(lora.weight, lora.has_weight).unwrap_or(1.0);
    if !weight.is_finite() {
        return Err(Failure::invalid(format!(
            "the weight of the LoRA `{path}` is {weight}, expected a number"
        )));
    }
    Ok(LoraRef { path: path.into(), weight, sha256: None })
}
