//! Progress, previews and messages on their way to the caller, and the images that are collected meanwhile.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use kiln_base::lock;
use kiln_engine::{Event, GeneratedImage, Phase, Plan, Progress, ProgressTracker, Sink};
use kiln_image::RgbImage;

use crate::abi::{self, SizedStruct};
use crate::cancel::{KilnCancelToken, TOKENS};
use crate::status::{Failure, in_callback};

/// What a call is doing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KilnPhase {
    /// Waiting for another call to end.
    Queue = 0,
    /// Loading the model.
    Load = 1,
    /// Encoding the prompt.
    Text = 2,
    /// Encoding input images.
    Encode = 3,
    /// Denoising.
    Steps = 4,
    /// Decoding the latents.
    Decode = 5,
}

/// The progress of a call. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnProgress {
    /// sizeof(kiln_progress) of the library.
    pub size: usize,
    /// What it is doing.
    pub phase: KilnPhase,
    /// Index of the current image, from 0.
    pub image: u32,
    /// Number of images.
    pub images: u32,
    /// Finished steps of the current image.
    pub step: u32,
    /// Steps of each image.
    pub steps: u32,
    /// Finished part of the whole call, from 0 to 1.
    pub fraction: f32,
    /// Estimated seconds left; negative: unknown.
    pub eta: f64,
}

/// Pixels: RGB, 8 bits each, rows from the top without padding.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnPixels {
    /// sizeof(kiln_pixels) of the library.
    pub size: usize,
    /// 3 * width * height bytes.
    pub rgb: *const u8,
    /// Width.
    pub width: u32,
    /// Height.
    pub height: u32,
}

/// Functions that are called while images are generated; each may be NULL.
///
/// They are called one at a time, from the calling thread or from one of the library's. Inside them, kiln_generate,
/// kiln_generate_json and kiln_model_load return KILN_STATUS_REENTRY. They must not throw or jump out. What they are given
/// is valid until they return.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnCallbacks {
    /// sizeof(kiln_callbacks).
    pub size: usize,
    /// Passed to each function.
    pub user: *mut c_void,
    /// Receives the progress, several times per second at most. A result other than 0 cancels the call.
    pub progress: Option<unsafe extern "C" fn(progress: *const KilnProgress, user: *mut c_void) -> c_int>,
    /// Receives a preview of the image in progress after each step; if NULL, none is computed.
    pub preview: Option<unsafe extern "C" fn(pixels: *const KilnPixels, user: *mut c_void)>,
    /// Receives a remark for the user, such as why a GPU is not used.
    pub log: Option<unsafe extern "C" fn(message: *const c_char, user: *mut c_void)>,
}

// SAFETY: `repr(C)`, the size is first, and pointers may be zero.
unsafe impl SizedStruct for KilnCallbacks {
    const NAME: &'static str = "kiln_callbacks";
}

/// The callbacks of one call. They run one at a time.
#[derive(Clone, Copy, Default)]
struct Callbacks(Option<KilnCallbacks>);

// SAFETY: the header says that callbacks may come from other threads, so `user` may be sent there.
unsafe impl Send for Callbacks {}

/// The sink of one call: passes on progress, collects images.
pub(crate) struct CallSink {
    token: Option<Arc<AtomicBool>>,
    /// Set by the progress callback.
    stopped: AtomicBool,
    wants_preview: bool,
    state: Mutex<State>,
    result: Mutex<Outcome>,
    ended: Condvar,
}

struct State {
    callbacks: Callbacks,
    tracker: ProgressTracker,
    /// When generating began, and the fraction then.
    start: Option<(Instant, f32)>,
}

#[derive(Default)]
struct Outcome {
    images: Vec<GeneratedImage>,
    result: Option<kiln_engine::Result<()>>,
}

impl CallSink {
    /// The sink of a call that loads a model.
    ///
    /// # Safety
    /// The callbacks are as the header says until the call ends.
    pub unsafe fn loading(
        callbacks: *const KilnCallbacks,
        token: *mut KilnCancelToken,
    ) -> Result<CallSink, Failure> {
        // SAFETY: promised by the caller.
        let callbacks = unsafe { abi::read(callbacks)? };
        let token = if token.is_null() { None } else { Some(TOKENS.get(token)?) };
        let state =
            State { callbacks: Callbacks(callbacks), tracker: ProgressTracker::loading(), start: None };
        Ok(CallSink {
            token,
            stopped: AtomicBool::new(false),
            wants_preview: callbacks.is_some_and(|callbacks| callbacks.preview.is_some()),
            state: Mutex::new(state),
            result: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    /// Tracks the progress of a plan from now on.
    pub fn track(&self, plan: &Plan) {
        lock(&self.state).tracker = ProgressTracker::new(plan);
    }

    /// Reports that the call waits for another one.
    pub fn queued(&self) {
        self.report(&mut lock(&self.state), Progress::default());
    }

    /// Whether the caller has cancelled the call.
    pub fn is_cancelled(&self) -> bool {
        self.stopped.load(SeqCst) || self.token.as_ref().is_some_and(|token| token.load(SeqCst))
    }

    /// Passes on the progress, and remembers if the caller then wants to stop.
    fn report(&self, state: &mut State, progress: Progress) {
        if !state.report(progress) {
            self.stopped.store(true, SeqCst);
        }
    }

    /// Passes on a remark.
    pub fn log(&self, message: &str) {
        let state = lock(&self.state);
        let Some(KilnCallbacks { log: Some(log), user, .. }) = state.callbacks.0 else { return };
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        // SAFETY: the header says how the function is called.
        in_callback(|| unsafe { log(message.as_ptr(), user) });
    }

    /// Waits for the end and returns the images.
    pub fn wait(&self) -> kiln_engine::Result<Vec<GeneratedImage>> {
        let mut outcome = lock(&self.result);
        loop {
            if let Some(result) = outcome.result.take() {
                return result.map(|()| std::mem::take(&mut outcome.images));
            }
            outcome = self.ended.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    /// Passes on the progress; returns whether to go on.
    fn report(&mut self, progress: Progress) -> bool {
        let Some(KilnCallbacks { progress: Some(callback), user, .. }) = self.callbacks.0 else {
            return true;
        };
        let mut eta = -1.0;
        if !matches!(progress.phase, Phase::Queue | Phase::Load) {
            let (start, from) = *self.start.get_or_insert_with(|| (Instant::now(), progress.fraction));
            let done = f64::from(progress.fraction - from);
            if done > 0.0 {
                eta = start.elapsed().as_secs_f64() / done * f64::from(1.0 - progress.fraction);
            }
        }
        let progress = KilnProgress {
            size: size_of::<KilnProgress>(),
            phase: phase(progress.phase),
            image: progress.image,
            images: progress.images,
            step: progress.step,
            steps: progress.steps,
            fraction: progress.fraction,
            eta,
        };
        // SAFETY: the header says how the function is called.
        in_callback(|| unsafe { callback(&raw const progress, user) }) == 0
    }
}

fn phase(phase: Phase) -> KilnPhase {
    match phase {
        Phase::Queue => KilnPhase::Queue,
        Phase::Load => KilnPhase::Load,
        Phase::Text => KilnPhase::Text,
        Phase::Encode => KilnPhase::Encode,
        Phase::Steps => KilnPhase::Steps,
        // Files are the caller's business: there is no phase for them.
        Phase::Decode | Phase::Save => KilnPhase::Decode,
    }
}

impl Sink for CallSink {
    fn cancelled(&self) -> bool {
        self.is_cancelled()
    }

    fn event(&self, event: &Event) {
        if let Event::Note(text) | Event::LoraApplied { report: text } = event {
            self.log(text);
        }
        let mut state = lock(&self.state);
        if let Some(progress) = state.tracker.update(event) {
            self.report(&mut state, progress);
        }
    }

    fn wants_preview(&self) -> bool {
        self.wants_preview
    }

    fn preview(&self, image: RgbImage) {
        let state = lock(&self.state);
        let Some(KilnCallbacks { preview: Some(preview), user, .. }) = state.callbacks.0 else { return };
        let pixels = KilnPixels {
            size: size_of::<KilnPixels>(),
            rgb: image.pixels().as_ptr(),
            width: image.width(),
            height: image.height(),
        };
        // SAFETY: the header says how the function is called.
        in_callback(|| unsafe { preview(&raw const pixels, user) });
    }

    fn image(&self, image: GeneratedImage) -> kiln_engine::Result<()> {
        lock(&self.result).images.push(image);
        Ok(())
    }

    fn ended(&self, result: kiln_engine::Result<()>) {
        lock(&self.result).result = Some(result);
        self.ended.notify_all();
    }
}
