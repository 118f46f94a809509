//! Settings of a model: device, precision, limits.

use kiln_catalog::user_cache;
use kiln_engine::{Device, Precision, Settings};
use pyo3::prelude::*;

use crate::errors;

/// Reads the settings that are given by name.
pub(crate) fn read(
    py: Python<'_>,
    device: &str,
    dtype: &str,
    threads: Option<usize>,
    vram_limit: Option<u64>,
) -> PyResult<Settings> {
    let invalid = |name: &str, found: &str, expected: &str| {
        errors::request(py, format!("{name} must be {expected}, found {found:?}"))
    };
    let device = Device::parse(device).map_err(|_| invalid("device", device, Device::NAMES))?;
    let precision = match dtype {
        "auto" => Precision::Auto,
        "f32" | "float32" => Precision::F32,
        "bf16" | "bfloat16" => Precision::Bf16,
        "int8" => Precision::Int8,
        "fp8" => Precision::Fp8,
        _ => return Err(invalid("dtype", dtype, "auto, f32, bf16, int8 or fp8")),
    };
    if let Some(threads) = threads.filter(|threads| !(1..=Settings::MAX_THREADS).contains(threads)) {
        let expected = format!("from 1 to {}", Settings::MAX_THREADS);
        return Err(invalid("threads", &threads.to_string(), &expected));
    }
    let text_cache = user_cache::texts().map_err(|error| errors::explained(py, &error))?;
    let kernel_cache = user_cache::folder().map(|folder| folder.join("cuda"));
    Ok(Settings { device, precision, threads, vram_limit, text_cache, kernel_cache, ..Settings::default() })
}
