//! Tensors from and to the f64 values that the reference computes with.

use kiln_tensor::{DType, HostTensor, Shape, bf16};

use crate::{Error, Result};

/// The backend's name in messages.
pub(super) const NAME: &str = "reference";

/// The elements as f64.
pub(super) fn values(x: &HostTensor) -> Result<Vec<f64>> {
    Ok(x.to_f32()?.iter().map(|&v| v.into()).collect())
}

/// `values` rounded to `dtype`, f32 or bf16.
pub(super) fn tensor(shape: impl Into<Shape>, dtype: DType, values: Vec<f64>) -> Result<HostTensor> {
    Ok(match dtype {
        DType::F32 => HostTensor::from_f32(shape, values.iter().map(|&v| v as f32).collect())?,
        DType::BF16 => HostTensor::from_bf16(shape, values.iter().map(|&v| bf16::from_f64(v)).collect())?,
        _ => return Err(Error::DType { op: "round", dtype, backend: NAME.into() }),
    })
}

/// `sums`, plus the values of `add`.
pub(super) fn plus(mut sums: Vec<f64>, add: Option<&HostTensor>) -> Result<Vec<f64>> {
    if let Some(add) = add {
        sums.iter_mut().zip(values(add)?).for_each(|(sum, add)| *sum += add);
    }
    Ok(sums)
}
