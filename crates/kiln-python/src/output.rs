//! A generated image.

use kiln_engine::{GeneratedImage, Recipe};
use kiln_image::{Encoding, Format, RgbImage};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::array::Array;
use crate::errors;

/// A generated image: pixels, latents and recipe.
#[pyclass(frozen, module = "kiln._kiln")]
pub(crate) struct Image {
    pixels: Py<Array>,
    latents: Py<Array>,
    image: RgbImage,
    index: usize,
    seed: Option<u64>,
    steps: [usize; 2],
    recipe: Recipe,
}
