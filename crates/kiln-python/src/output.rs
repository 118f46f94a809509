//! A generated image.

use std::str::FromStr;
use std::sync::Arc;

use kiln_engine::{Embedded, GeneratedImage, Payload, Recipe};
use kiln_image::{Encoding, Format, RgbImage};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::array::Array;
use crate::errors;
use crate::signer::Signer;

/// A generated image: pixels, latents and recipe.
#[pyclass(frozen, module = "kiln._kiln")]
pub(crate) struct Image {
    pixels: Py<Array>,
    latents: Py<Array>,
    index: usize,
    seed: Option<u64>,
    steps: (usize, usize),
    recipe: Recipe,
}

impl Image {
    pub fn new(py: Python<'_>, generated: GeneratedImage) -> PyResult<Image> {
        let GeneratedImage { index, image, latents, seed, steps, recipe } = generated;
        let latents = Array::of_tensor(&latents).map_err(|error| errors::explained(py, &error))?;
        Ok(Image {
            pixels: Py::new(py, Array::of_pixels(image))?,
            latents: Py::new(py, latents)?,
            index,
            seed,
            steps: (steps.computed, steps.reused),
            recipe,
        })
    }
}

#[pymethods]
impl Image {
    /// The pixels, `[height, width, 3]`, u8.
    #[getter]
    fn pixels(&self, py: Python<'_>) -> Py<Array> {
        self.pixels.clone_ref(py)
    }

    /// The final normalized latents as tokens, `[tokens, channels]`, f32.
    #[getter]
    fn latents(&self, py: Python<'_>) -> Py<Array> {
        self.latents.clone_ref(py)
    }

    /// Its index in the request, from 0.
    #[getter]
    fn index(&self) -> usize {
        self.index
    }

    /// Its seed, if its noise was drawn from one.
    #[getter]
    fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Steps computed, and steps that reused the step cache.
    #[getter]
    fn steps(&self) -> (usize, usize) {
        self.steps
    }

    /// How it was generated, as JSON.
    #[getter]
    fn recipe(&self) -> String {
        self.recipe.to_json()
    }

    /// Encodes it as a file with its recipe, as the command line does. `format`: png, jpeg or webp.
    #[pyo3(signature = (format, quality=None, small=false, recipe=true, ai_mark=true, signer=None, watermark=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        format: &str,
        quality: Option<u8>,
        small: bool,
        recipe: bool,
        ai_mark: bool,
        signer: Option<&Signer>,
        watermark: Option<&str>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let format = match format {
            "png" => Format::Png,
            "jpeg" | "jpg" => Format::Jpeg,
            "webp" => Format::Webp,
            _ => {
                return Err(errors::request(
                    py,
                    format!("can't write {format:?}: expected png, jpeg or webp"),
                ));
            }
        };
        if quality.is_some_and(|quality| quality > 100) {
            return Err(errors::request(py, "quality must be from 0 to 100"));
        }
        let watermark = watermark.map(Payload::from_str).transpose();
        let watermark = watermark.map_err(|problem| errors::request(py, problem))?;
        let credentials = signer.map(|signer| Arc::clone(&signer.credentials));
        let pixels = self.pixels.get();
        let bytes = py.detach(|| {
            let [height, width] = pixels.sides();
            let image = RgbImage::new(width, height, pixels.bytes().to_vec())?;
            let embedded = Embedded { recipe, ai_mark, credentials, watermark, ..Embedded::default() };
            self.recipe.encode(&image, Encoding { format, quality, small }, &embedded)
        });
        match bytes {
            Ok(bytes) => Ok(PyBytes::new(py, &bytes)),
            Err(error) => Err(errors::explained(py, &error)),
        }
    }
}
