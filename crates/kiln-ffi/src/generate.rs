//! Generates images: from a request of the header, or from one in JSON.

use std::ffi::c_char;
use std::sync::Arc;

use kiln_engine::{Plan, Request, Sink, Task};

use crate::abi;
use crate::callbacks::{CallSink, KilnCallbacks};
use crate::cancel::KilnCancelToken;
use crate::images::{IMAGES, KilnImages};
use crate::model::{KilnModel, MODELS};
use crate::request::{self, Inputs, KilnInput, KilnRequest};
use crate::status::{Failure, KilnStatus, guard_blocking};

/// Generates the images of a request. Returns when they are finished; calls for the same model wait for each other.
///
/// `callbacks` and `token` may be NULL. `*images` is NULL after an error; free it with kiln_images_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_generate(
    model: *mut KilnModel,
    request: *const KilnRequest,
    callbacks: *const KilnCallbacks,
    token: *mut KilnCancelToken,
    images: *mut *mut KilnImages,
) -> KilnStatus {
    guard_blocking(|| {
        // SAFETY: arguments as the header says.
        unsafe { clear(images)? };
        // SAFETY: as above.
        generate(
            model,
            unsafe { request::read(request)? },
            unsafe { CallSink::loading(callbacks, token)? },
            images,
        )
    })
}

/// As kiln_generate, with the request in the JSON of `/v1/jobs` and of recipes, which has every field there is.
///
/// Images are paths in it, or "input:0", "input:1", … for those in `inputs`, which is NULL if `input_count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_generate_json(
    model: *mut KilnModel,
    json: *const c_char,
    inputs: *const KilnInput,
    input_count: usize,
    callbacks: *const KilnCallbacks,
    token: *mut KilnCancelToken,
    images: *mut *mut KilnImages,
) -> KilnStatus {
    guard_blocking(|| {
        // SAFETY: arguments as the header says.
        unsafe { clear(images)? };
        // SAFETY: as above.
        let json = unsafe { abi::text(json, "JSON")? };
        let json = json.ok_or_else(|| Failure::invalid("the JSON of the request is NULL"))?;
        let request = request::with_json(&Request::default(), &json)?;
        // SAFETY: as above.
        let inputs = unsafe { Inputs::read(inputs, input_count)? };
        // SAFETY: as above.
        generate(model, (request, inputs), unsafe { CallSink::loading(callbacks, token)? }, images)
    })
}

/// Sets the result to NULL.
///
/// # Safety
/// `images` is NULL or writable.
unsafe fn clear(images: *mut *mut KilnImages) -> Result<(), Failure> {
    if images.is_null() {
        return Err(Failure::invalid("the pointer for the kiln_images is NULL"));
    }
    // SAFETY: not NULL, and the caller's to write.
    unsafe { *images = std::ptr::null_mut() };
    Ok(())
}

/// Generates the images and writes their handle to `images`, which [`clear`] has checked.
fn generate(
    model: *mut KilnModel,
    (mut request, inputs): (Request, Inputs),
    sink: CallSink,
    images: *mut *mut KilnImages,
) -> Result<(), Failure> {
    let loaded = MODELS.get(model)?;
    if sink.is_cancelled() {
        return Err(Failure::cancelled());
    }
    request.ensure_seed().map_err(|what| Failure::new(KilnStatus::Io, what).hint("give a seed"))?;
    let plan = Arc::new(Plan::new(&loaded.model, &request, &inputs)?);
    sink.track(&plan);
    let sink = Arc::new(sink);
    let generated = {
        let _turn = loaded.turn(&sink)?;
        let task_sink: Arc<dyn Sink> = sink.clone();
        loaded.session.generate(&[Task { plan, sink: task_sink }]);
        sink.wait()?
    };
    // SAFETY: checked by `clear`, and the caller's to write.
    unsafe { *images = IMAGES.insert(generated.into_iter().map(Into::into).collect()) };
    Ok(())
}
