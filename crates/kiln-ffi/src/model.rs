//! Models: opened by name, loaded once, used by any number of threads one after the other.

use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use kiln_base::lock;
use kiln_catalog::{ModelFolders, user_cache};
use kiln_engine::{ComponentPaths, Device, Model, Precision, Session, Settings};

use crate::abi::{self, SizedStruct};
use crate::callbacks::{CallSink, KilnCallbacks};
use crate::cancel::KilnCancelToken;
use crate::handles::Table;
use crate::status::{Failure, KilnStatus, guard, guard_blocking};

pub(crate) static MODELS: Table<LoadedModel> = Table::new("kiln_model");

/// How often a call that waits for another one looks whether it is cancelled.
const POLL: Duration = Duration::from_millis(20);

/// A model. Several threads may use one: their calls run one after the other.
pub struct KilnModel(());

/// How to open a model. All zero but the size are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnModelOptions {
    /// sizeof(kiln_model_options).
    pub size: usize,
    /// "auto", "cpu", "cuda" or "cuda:N", or "wgpu", "vulkan", "metal" or "dx12", with ":N", too; NULL: auto.
    pub device: *const c_char,
    /// "auto", "f32", "bf16", "int8" or "fp8"; NULL: auto.
    pub dtype: *const c_char,
    /// CPU threads; 0: as many as the machine runs at once.
    pub threads: u32,
    /// Most images that are generated together; 0: 4.
    pub max_batch: u32,
    /// Most GPU memory to use, in bytes; 0: all that is free. Weights that don't fit are streamed.
    pub vram_limit: u64,
    /// A folder in which models are looked for by name, before the user's own; NULL: that of KILN_MODELS.
    pub models_folder: *const c_char,
    /// A text encoder to use instead of the model's own; NULL: its own.
    pub text_encoder: *const c_char,
    /// A VAE to use instead of the model's own; NULL: its own.
    pub vae: *const c_char,
    /// A tokenizer to use instead of the model's own; NULL: its own.
    pub tokenizer: *const c_char,
    /// A small VAE (TAEF2) for previews; NULL: a linear approximation.
    pub preview_vae: *const c_char,
}

// SAFETY: `repr(C)`, the size is first, and numbers and pointers may be zero.
unsafe impl SizedStruct for KilnModelOptions {
    const NAME: &'static str = "kiln_model_options";
}

/// An opened model and the session that keeps it loaded.
pub(crate) struct LoadedModel {
    pub model: Arc<Model>,
    pub session: Session,
    /// Whether a call uses the session.
    busy: Mutex<bool>,
    free: Condvar,
}

/// The right to use a model's session.
pub(crate) struct ModelGuard<'a>(&'a LoadedModel);

impl LoadedModel {
    /// Waits until no other call uses the session, or until the call is cancelled.
    pub fn turn(&self, sink: &CallSink) -> Result<ModelGuard<'_>, Failure> {
        let mut told = false;
        while !self.try_turn() {
            if !std::mem::replace(&mut told, true) {
                sink.queued();
            }
            if sink.is_cancelled() {
                return Err(Failure::cancelled());
            }
        }
        Ok(ModelGuard(self))
    }

    /// Waits a moment for the turn; returns whether it is ours.
    fn try_turn(&self) -> bool {
        let mut busy = lock(&self.busy);
        if *busy {
            (busy, _) = self.free.wait_timeout(busy, POLL).unwrap_or_else(PoisonError::into_inner);
        }
        !std::mem::replace(&mut *busy, true)
    }
}

impl Drop for ModelGuard<'_> {
    fn drop(&mut self) {
        *lock(&self.0.busy) = false;
        self.0.free.notify_one();
    }
}

/// Opens a model: "ember" (built in), a name of `kiln models`, a folder, or a file (safetensors, GGUF, model.toml).
///
/// `name`: NULL is the built-in model. `options`: NULL are the defaults. `*model` is NULL after an error; free it with
/// kiln_model_free. Weights are loaded by the first image or by kiln_model_load.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_model_open(
    name: *const c_char,
    options: *const KilnModelOptions,
    model: *mut *mut KilnModel,
) -> KilnStatus {
    guard(|| {
        if model.is_null() {
            return Err(Failure::invalid("the pointer for the kiln_model is NULL"));
        }
        // SAFETY: not NULL, and the caller's to write.
        unsafe { *model = std::ptr::null_mut() };
        // SAFETY: arguments as the header says.
        let (name, options) = unsafe { (abi::name(name, "name")?, abi::read(options)?) };
        // SAFETY: the texts of the options are as the header says.
        let options = options.map(|options| unsafe { OpenOptions::read(&options) }).transpose()?;
        let opened = open(name.as_deref(), options.unwrap_or_default())?;
        // SAFETY: as above.
        unsafe { *model = MODELS.insert(opened) };
        Ok(())
    })
}

/// Loads the model's weights now instead of with the first image. `callbacks` and `token` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_model_load(
    model: *mut KilnModel,
    callbacks: *const KilnCallbacks,
    token: *mut KilnCancelToken,
) -> KilnStatus {
    guard_blocking(|| {
        let loaded = MODELS.get(model)?;
        // SAFETY: arguments as the header says.
        let sink = unsafe { CallSink::loading(callbacks, token)? };
        let _turn = loaded.turn(&sink)?;
        Ok(loaded.session.load(&loaded.model, &sink)?)
    })
}

/// Frees a model; NULL is ignored. Calls that still use it run to their end.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_model_free(model: *mut KilnModel) -> KilnStatus {
    guard(|| MODELS.remove(model))
}

#[derive(Default)]
struct OpenOptions {
    settings: Settings,
    max_batch: Option<usize>,
    models_folder: Option<PathBuf>,
    components: ComponentPaths,
}

impl OpenOptions {
    /// # Safety
    /// The texts are NULL or end in NUL.
    unsafe fn read(options: &KilnModelOptions) -> Result<OpenOptions, Failure> {
        // SAFETY: promised by the caller.
        let text = |pointer, name: &str| unsafe { abi::name(pointer, name) };
        let path = |pointer, name: &str| Ok::<_, Failure>(text(pointer, name)?.map(PathBuf::from));
        let invalid = |name: &str, found: &str, expected: &str| {
            Failure::invalid(format!("the {name} is `{found}`, {expected}"))
        };
        let device = match text(options.device, "device")? {
            Some(device) => {
                Device::parse(&device).map_err(|expected| invalid("device", &device, &expected))?
            }
            None => Device::Auto,
        };
        let precision = match text(options.dtype, "dtype")? {
            Some(dtype) => {
                Precision::parse(&dtype).map_err(|expected| invalid("dtype", &dtype, &expected))?
            }
            None => Precision::Auto,
        };
        let most = Settings::MAX_THREADS;
        if options.threads as usize > most {
            return Err(invalid(
                "number of threads",
                &options.threads.to_string(),
                &format!("expected at most {most}"),
            ));
        }
        let given = |number: u32| (number > 0).then_some(number as usize);
        Ok(OpenOptions {
            settings: Settings {
                device,
                precision,
                threads: given(options.threads),
                vram_limit: (options.vram_limit > 0).then_some(options.vram_limit),
                preview_vae: path(options.preview_vae, "preview_vae")?,
                ..Settings::default()
            },
            max_batch: given(options.max_batch),
            models_folder: path(options.models_folder, "models_folder")?,
            components: ComponentPaths {
                text_encoder: path(options.text_encoder, "text_encoder")?,
                vae: path(options.vae, "vae")?,
                tokenizer: path(options.tokenizer, "tokenizer")?,
                ..ComponentPaths::default()
            },
        })
    }
}

fn open(name: Option<&str>, options: OpenOptions) -> Result<LoadedModel, Failure> {
    let folders = match options.models_folder {
        Some(folder) => ModelFolders::from_env().with_first(folder),
        None => ModelFolders::from_env(),
    };
    let location = folders.resolve(name.map(Path::new))?;
    let model = Arc::new(location.open_with(&options.components)?);
    let settings = Settings {
        text_cache: user_cache::texts()?,
        kernel_cache: user_cache::folder().map(|folder| folder.join("cuda")),
        ..options.settings
    };
    let session = Session::new(settings, options.max_batch.unwrap_or(Settings::MAX_BATCH));
    Ok(LoadedModel { model, session, busy: Mutex::new(false), free: Condvar::new() })
}
