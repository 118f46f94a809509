//! 8-bit weights with one scale a row: `X` as i8 `[rows, …]` beside `X_scale` `[rows]`, value = integer × scale.

use kiln_tensor::{DType, HostTensor, Result, bf16};

/// What the scales' name has behind their tensor's.
pub(crate) const SCALE: &str = "_scale";

/// The name of the scales that belong to the tensor `name`.
pub(crate) fn scale_name(name: &str) -> String {
    format!("{name}{SCALE}")
}

/// The values of `weight`, rounded to bf16; `None` when there isn't one scale for every row.
pub(crate) fn widen(weight: &HostTensor, scale: &HostTensor) -> Result<Option<HostTensor>> {
    let rows = weight.shape().dims().first().copied().unwrap_or(0);
    if weight.dtype() != DType::I8 || scale.numel() != rows || rows == 0 {
        return Ok(None);
    }
    let scales = scale.to_f32()?;
    let row = weight.numel() / rows;
    let mut values = Vec::with_capacity(weight.numel());
    for (bytes, scale) in weight.bytes().chunks(row.max(1)).zip(scales.iter()) {
        values.extend(bytes.iter().map(|&b| bf16::from_f32(f32::from(b as i8) * scale)));
    }
    Ok(Some(HostTensor::from_bf16(weight.shape(), values)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int8(shape: [usize; 2], values: &[i8]) -> HostTensor {
        let bytes: Vec<u8> = values.iter().map(|&v| v as u8).collect();
        HostTensor::new(DType::I8, shape, bytes.into()).unwrap()
    }

    #[test]
    fn each_row_has_its_own_scale() {
        let weight = int8([2, 3], &[1, -2, 127, -128, 0, 4]);
        let scale = HostTensor::from_f32([2], vec![0.5, 2.0]).unwrap();
        let wide = widen(&weight, &scale).unwrap().unwrap();
        assert_eq!(wide.dtype(), DType::BF16);
        assert_eq!(wide.to_f32().unwrap().as_ref(), [0.5, -1.0, 63.5, -256.0, 0.0, 8.0]);
    }

    #[test]
    fn scales_that_do_not_fit_the_rows_are_not_taken() {
        let weight = int8([2, 2], &[1, 2, 3, 4]);
        assert_eq!(widen(&weight, &HostTensor::zeros([3])).unwrap(), None);
        assert_eq!(widen(&HostTensor::zeros([2, 2]), &HostTensor::zeros([2])).unwrap(), None);
    }
}
