//! Whether tensors hold NaN or infinity, asked without waiting for the device.

use kiln_ops::{Backend, Pending};

use crate::Result;

/// Returns for each of these tensors, of which there is at least one, whether all its values are finite. The result is there
/// when all operations called before are complete, like that of [`Backend::fence`].
pub fn are_finite<B: Backend>(b: &B, tensors: &[&B::Tensor]) -> Result<Pending<Vec<bool>>> {
    // The difference of a value to itself is 0, or NaN if the value is NaN or infinite.
    let flags = tensors.iter().map(|x| b.relative_l1(x, x)).collect::<kiln_ops::Result<Vec<_>>>()?;
    let flags = match &flags[..] {
        [one] => b.download_async(one)?,
        several => b.download_async(&b.concat_rows(&several.iter().collect::<Vec<_>>())?)?,
    };
    Ok(Box::new(move || Ok(flags()?.to_f32()?.iter().map(|flag| !flag.is_nan()).collect())))
}

#[cfg(test)]
mod tests {
    use kiln_ops::Reference;
    use kiln_tensor::{DType, HostTensor};

    use super::*;

    #[test]
    fn nan_and_infinity_are_found_wherever_they_are() {
        let b = Reference::new();
        let tensor = |last: f32| {
            let host = HostTensor::from_f32([2, 3], vec![0.0, 1e30, -1e38, f32::MAX, 0.0, last]).unwrap();
            b.upload(&host, DType::F32).unwrap()
        };
        let [good, zero] = [tensor(1.0), tensor(0.0)];
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(tensor);
        let all = [&good, &bad[0], &zero, &bad[1], &bad[2]];
        assert_eq!(are_finite(&b, &all).unwrap()().unwrap(), [true, false, true, false, false]);
        assert_eq!(are_finite(&b, &all[1..2]).unwrap()().unwrap(), [false]);
    }
}
