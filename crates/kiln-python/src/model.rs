//! A model: opened by name, loaded on first use.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_catalog::ModelFolders;
use kiln_engine::upsample::PromptRewriter;
use kiln_engine::{ComponentPaths, Plan, Request, Session, Settings};
use kiln_image::RgbImage;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::array::Array;
use crate::errors::{self, Kind};
use crate::inputs::{Inputs, tensor_from};
use crate::job::{Job, describe};
use crate::sink::Subscriptions;
use crate::{settings, wait};

/// A model and the device it runs on. Its weights are loaded on first use.
#[pyclass(frozen, module = "kiln._kiln")]
pub(crate) struct Model {
    name: PathBuf,
    components: ComponentPaths,
    settings: Settings,
    /// Locked only while the interpreter is held, so that a fork never copies it locked.
    state: Mutex<State>,
}

struct State {
    process: u32,
    model: Arc<kiln_engine::Model>,
    session: Arc<Session>,
}

impl State {
    fn open(
        py: Python<'_>,
        name: &Path,
        components: &ComponentPaths,
        settings: &Settings,
    ) -> PyResult<State> {
        let open = || ModelFolders::from_env().resolve(Some(name))?.open_with(components);
        let model = py.detach(open).map_err(|error| errors::explained(py, &error))?;
        let session = Arc::new(Session::new(settings.clone(), Settings::MAX_BATCH));
        Ok(State { process: std::process::id(), model: Arc::new(model), session })
    }
}

impl Model {
    /// The model and its session. In a forked child, which has none of the parent's threads, both are opened again.
    fn state(&self, py: Python<'_>) -> PyResult<(Arc<kiln_engine::Model>, Arc<Session>)> {
        let current = |state: &State| (Arc::clone(&state.model), Arc::clone(&state.session));
        let (process, model, session) = {
            let state = lock(&self.state);
            let (model, session) = current(&state);
            (state.process, model, session)
        };
        if process == std::process::id() {
            return Ok((model, session));
        }
        if session.loaded().iter().any(|loaded| loaded.info.device.starts_with("cuda")) {
            let what =
                "this model was used on a GPU before the process was forked, and CUDA does not survive that";
            let hint =
                "start processes with multiprocessing.get_context(\"spawn\"), or load the model in the child";
            return Err(errors::exception(py, Kind::Model, what.into(), Some(hint.into())));
        }
        let new = State::open(py, &self.name, &self.components, &self.settings)?;
        let result = current(&new);
        // Dropping the parent's would wait for threads that this process does not have.
        std::mem::forget((std::mem::replace(&mut *lock(&self.state), new), model, session));
        Ok(result)
    }

    fn resolve(
        &self,
        py: Python<'_>,
        request: &str,
        images: &Bound<'_, PyDict>,
        tensors: &Bound<'_, PyDict>,
    ) -> PyResult<(Plan, Arc<Session>)> {
        let (model, session) = self.state(py)?;
        let mut request = parse(py, request)?;
        let inputs = Inputs::new(images, tensors)?;
        request.ensure_seed().map_err(|text| errors::exception(py, Kind::Other, text, None))?;
        let plan = py.detach(|| Plan::new(&model, &request, &inputs));
        Ok((plan.map_err(|error| errors::explained(py, &error))?, session))
    }
}

/// The fields of a request with their descriptions, as JSON.
#[pyfunction]
pub(crate) fn request_fields() -> String {
    serde_json::Value::Object(kiln_engine::json_fields::<Request>()).to_string()
}

fn parse(py: Python<'_>, request: &str) -> PyResult<Request> {
    serde_json::from_str(request).map_err(|error| errors::request(py, explain(request, &error)))
}

/// Says which field of a request is wrong.
fn explain(request: &str, error: &serde_json::Error) -> String {
    let fields: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(request).unwrap_or_default();
    let problem = |(name, value): (String, serde_json::Value)| {
        let alone = serde_json::Value::Object([(name.clone(), value)].into_iter().collect());
        let error = serde_json::from_value::<Request>(alone).err()?;
        Some(format!("invalid `{name}`: {error}"))
    };
    fields.into_iter().find_map(problem).unwrap_or_else(|| format!("invalid request: {error}"))
}

#[pymethods]
impl Model {
    #[new]
    #[pyo3(signature = (
        name, *, device="auto", dtype="auto", threads=None, vram_limit=None, text_encoder=None, vae=None,
        tokenizer=None, transformer=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn new(
        py: Python<'_>,
        name: PathBuf,
        device: &str,
        dtype: &str,
        threads: Option<usize>,
        vram_limit: Option<u64>,
        text_encoder: Option<PathBuf>,
        vae: Option<PathBuf>,
        tokenizer: Option<PathBuf>,
        transformer: Option<PathBuf>,
    ) -> PyResult<Model> {
        let settings = settings::read(py, device, dtype, threads, vram_limit)?;
        let components =
            ComponentPaths { text_encoder, vae, tokenizer, transformer, ..ComponentPaths::default() };
        let state = Mutex::new(State::open(py, &name, &components, &settings)?);
        Ok(Model { name, components, settings, state })
    }

    /// Starts a request, given as the JSON of `/v1/jobs` with the images and tensors that it names.
    #[pyo3(signature = (request, images, tensors, *, progress=false, previews=false, steps=false))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn start(
        &self,
        py: Python<'_>,
        request: &str,
        images: &Bound<'_, PyDict>,
        tensors: &Bound<'_, PyDict>,
        progress: bool,
        previews: bool,
        steps: bool,
    ) -> PyResult<Job> {
        let (plan, session) = self.resolve(py, request, images, tensors)?;
        Ok(Job::start(session, plan, Subscriptions { progress, previews, steps })?)
    }

    /// Checks a request and fills in its defaults: sizes, steps and notes.
    fn plan<'py>(
        &self,
        py: Python<'py>,
        request: &str,
        images: &Bound<'_, PyDict>,
        tensors: &Bound<'_, PyDict>,
    ) -> PyResult<Bound<'py, PyDict>> {
        describe(py, &self.resolve(py, request, images, tensors)?.0)
    }

    /// Loads the weights, which otherwise happens on first use.
    fn load(&self, py: Python<'_>) -> PyResult<()> {
        let (model, session) = self.state(py)?;
        wait::run(py, |sink| session.load(&model, sink))
    }

    /// Drops the loaded weights; they are loaded again on next use.
    fn unload(&self, py: Python<'_>) -> PyResult<()> {
        let (_, session) = self.state(py)?;
        py.detach(|| session.reset());
        Ok(())
    }

    /// Encodes the prompts of a request, then its negative prompts if it has guidance: `[tokens, dim]` each.
    fn encode_prompts(
        &self,
        py: Python<'_>,
        request: &str,
        images: &Bound<'_, PyDict>,
        tensors: &Bound<'_, PyDict>,
    ) -> PyResult<Vec<Array>> {
        let (plan, session) = self.resolve(py, request, images, tensors)?;
        wait::run(py, |sink| -> kiln_engine::Result<_> {
            let texts =
                session.with_engine(&plan.model, sink, |engine| engine.encode_prompts(&plan, sink))?;
            texts.iter().map(Array::of_tensor).collect()
        })
    }

    /// Rewrites the prompts of a request with the model's own language model, which sees its references.
    fn upsample_prompts(
        &self,
        py: Python<'_>,
        request: &str,
        images: &Bound<'_, PyDict>,
        temperature: f32,
    ) -> PyResult<Vec<String>> {
        let (model, _) = self.state(py)?;
        let (mut request, inputs) = (parse(py, request)?, Inputs::new(images, &PyDict::new(py))?);
        let settings = &self.settings;
        wait::run(py, move |sink| -> kiln_engine::Result<_> {
            let rewriter = PromptRewriter::open(&model, None, !request.references.is_empty())?;
            let go_on = &mut || !sink.cancelled();
            rewriter.rewrite(std::slice::from_mut(&mut request), temperature, &inputs, settings, go_on)?;
            Ok(request.prompts)
        })
    }

    /// Encodes an image, whose sides must be multiples of 16, to normalized latents, `[tokens, channels]`.
    fn encode_image(
        &self,
        py: Python<'_>,
        width: u32,
        height: u32,
        pixels: &Bound<'_, PyBytes>,
    ) -> PyResult<Array> {
        let image = RgbImage::new(width, height, pixels.as_bytes().to_vec());
        let image = image.map_err(|error| errors::request(py, error.to_string()))?;
        let (model, session) = self.state(py)?;
        wait::run(py, |sink| -> kiln_engine::Result<_> {
            session.with_engine(&model, sink, |engine| {
                Array::of_tensor(&engine.encode_image(&image, None, sink)?)
            })
        })
    }

    /// Decodes normalized latents, `(shape, dtype, bytes)`, the tokens of `height` by `width` pixels, to pixels.
    fn decode_latents(
        &self,
        py: Python<'_>,
        latents: &Bound<'_, PyAny>,
        height: usize,
        width: usize,
    ) -> PyResult<Array> {
        let latents = tensor_from(latents)?;
        let (model, session) = self.state(py)?;
        let grid = model.grid([width, height]);
        wait::run(py, |sink| -> kiln_engine::Result<_> {
            session.with_engine(&model, sink, |engine| {
                Ok(Array::of_pixels(engine.decode_latents(&latents, grid, None, sink)?))
            })
        })
    }

    /// Converts normalized latents, `(shape, dtype, bytes)`, the tokens of `height` by `width` pixels, to the VAE's own:
    /// `[rows · patch, columns · patch, channels / patch²]`.
    fn unpack_latents(
        &self,
        py: Python<'_>,
        latents: &Bound<'_, PyAny>,
        height: usize,
        width: usize,
    ) -> PyResult<Array> {
        let latents = tensor_from(latents)?;
        let (model, session) = self.state(py)?;
        let grid = model.grid([width, height]);
        wait::run(py, |sink| -> kiln_engine::Result<_> {
            session.with_engine(&model, sink, |engine| {
                Array::of_tensor(&engine.unpack_latents(&latents, grid, None)?)
            })
        })
    }

    /// Its variant, defaults and sizes.
    #[getter]
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (model, session) = self.state(py)?;
        let fields = PyDict::new(py);
        fields.set_item("name", model.recorded_name())?;
        fields.set_item("path", &model.path)?;
        fields.set_item("variant", model.variant.name)?;
        fields.set_item("size", model.default_size)?;
        fields.set_item("steps", model.default_steps())?;
        fields.set_item("guidance", model.default_guidance())?;
        fields.set_item("max_tokens", model.default_tokens())?;
        fields.set_item("unit", model.pixels_per_token())?;
        fields.set_item("channels", model.transformer.config.in_channels)?;
        fields.set_item("text_dim", model.transformer.config.joint_attention_dim)?;
        fields.set_item("has_text_encoder", model.text_encoder.is_some())?;
        let layers = model.text_encoder.as_ref().map(|encoder| encoder.config.output_layers().to_vec());
        fields.set_item("text_layers", layers)?;
        let loaded = session.loaded().into_iter().next().map(|loaded| loaded.info);
        fields.set_item("device", loaded.as_ref().map(|info| info.device.clone()))?;
        fields.set_item("backend", loaded.as_ref().map(|info| info.backend.clone()))?;
        fields.set_item("dtype", loaded.as_ref().map(|info| info.dtype))?;
        Ok(fields)
    }
}
