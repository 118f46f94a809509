//! 8-bit weights with one scale a row: `X` as i8 `[rows, …]` beside `X_scale` `[rows]`, value = integer × scale.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use bytes::Bytes;
use kiln_base::lock;
use kiln_tensor::{DType, HostTensor, Result, Shape, bf16, int8};

use crate::map::Made;

/// The form in which a model gets its linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinearForm {
    /// Floats, as they are stored; 8-bit rows as the bf16 values they stand for.
    #[default]
    Float,
    /// The layers of the transformer's blocks as 8-bit rows: as they are stored, else rounded when they are loaded, by
    /// so many threads. All other layers as floats.
    Int8 {
        /// How many threads round; at least one does.
        threads: usize,
    },
    /// The layers of the transformer's blocks as floats that ask for products in 8-bit floats. All other layers as floats.
    Fp8,
    /// The layers that the file has in 8-bit floats (e4m3), with products in these; all others as floats.
    StoredFp8,
}

impl LinearForm {
    /// Whether the layer `module` is to be handed out as 8-bit rows, and how many threads may round it.
    pub(crate) fn int8_threads(self, module: &str) -> Option<usize> {
        match self {
            LinearForm::Int8 { threads } if takes(module) => Some(threads),
            _ => None,
        }
    }
}

/// Whether layer `module` of a transformer is used in 8 bits: those inside the blocks are.
///
/// The layers around them (embedders, modulations, the output) hold a twentieth of the weights and take little of the
/// time, but rounding them costs a quarter of all the error: measured on a trained model, the velocity is off by 1.9 % with
/// the blocks alone and by 2.5 % with everything, half of the difference through the output layer.
pub(crate) fn takes(module: &str) -> bool {
    ["transformer_blocks.", "single_transformer_blocks."].iter().any(|blocks| module.starts_with(blocks))
}

/// What the scales' name has behind their tensor's.
pub(crate) const SCALE: &str = "_scale";

/// The name of the scales that belong to the tensor `name`.
pub(crate) fn scale_name(name: &str) -> String {
    format!("{name}{SCALE}")
}

/// The scales as `[rows]`; `None` when there isn't one for every row of `weight`.
pub(crate) fn row_scales(weight: &Shape, scale: &HostTensor) -> Result<Option<HostTensor>> {
    let rows = weight.dims().first().copied().unwrap_or(0);
    if scale.numel() != rows || rows == 0 {
        return Ok(None);
    }
    Ok(Some(scale.to_dtype(DType::F32)?.reshape([rows])?))
}

/// The values of `weight`, rounded to bf16.
pub(crate) fn widen(weight: &HostTensor, scales: &HostTensor) -> Result<HostTensor> {
    let scales = scales.to_f32()?;
    let row = weight.numel() / scales.len().max(1);
    let mut values = Vec::with_capacity(weight.numel());
    for (bytes, scale) in weight.bytes().chunks(row.max(1)).zip(scales.iter()) {
        values.extend(bytes.iter().map(|&b| bf16::from_f32(f32::from(b as i8) * scale)));
    }
    HostTensor::from_bf16(weight.shape(), values)
}

/// A matrix in 8 bits.
#[derive(Clone, Debug)]
pub(crate) struct Rounded {
    pub weight: HostTensor,
    pub scale: HostTensor,
    /// Sums of the squared errors and of the squared values.
    pub squares: [f64; 2],
}

/// Rows that a thread takes at a time.
const ROWS_AT_ONCE: usize = 64;

/// One piece of the work: the bytes, scales and squares of some rows.
type Piece<'a> = (&'a mut [u8], &'a mut [f32], [f64; 2]);

/// Rounds the rows of a float matrix.
pub(crate) fn round(weight: &HostTensor, threads: usize) -> Result<Rounded> {
    let (rows, cols) = (weight.shape().rows(), weight.shape().last());
    let (mut bytes, mut scales) = (Made::zeros(weight.numel()), vec![0f32; rows]);
    let pieces = bytes.as_mut().chunks_mut((ROWS_AT_ONCE * cols).max(1)).zip(scales.chunks_mut(ROWS_AT_ONCE));
    let pieces: Vec<_> = pieces.map(|(b, s)| std::sync::Mutex::new((b, s, [0.0; 2]) as Piece<'_>)).collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some((i, piece)) = Some(next.fetch_add(1, Relaxed)).and_then(|i| Some((i, pieces.get(i)?)))
        {
            // Nobody else has this number; a lock is how to say so without `unsafe`.
            let mut piece = lock(&piece);
            round_rows(weight, i * ROWS_AT_ONCE, &mut piece)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(pieces.len())).map(|_| scope.spawn(work)).collect();
        let mine = work();
        // A thread that panicked has panicked here, too, had it been this one: hand that on.
        others.into_iter().try_fold((), |(), t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))?;
        mine
    })?;
    // In the order of rows: the sum is the same for any number of threads.
    let squares = pieces.into_iter().fold([0.0; 2], |sum, piece| {
        let (_, _, [error, value]) = piece.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        [sum[0] + error, sum[1] + value]
    });
    Ok(Rounded {
        weight: HostTensor::new(DType::I8, weight.shape(), Bytes::from_owner(bytes))?,
        scale: HostTensor::from_f32([rows], scales)?,
        squares,
    })
}

fn round_rows(weight: &HostTensor, first: usize, (bytes, scales, squares): &mut Piece<'_>) -> Result<()> {
    let cols = weight.shape().last();
    let mut integers = vec![0i8; cols];
    for (i, (bytes, scale)) in bytes.chunks_exact_mut(cols).zip(scales.iter_mut()).enumerate() {
        let row = weight.rows(first + i..first + i + 1)?;
        let row = row.to_f32()?;
        *scale = int8::quantise_row(&row, &mut integers);
        let mut sums = [0f32; 2];
        for ((out, &q), &x) in bytes.iter_mut().zip(&integers).zip(row.iter()) {
            *out = q as u8;
            let error = f32::from(q) * *scale - x;
            sums = [sums[0] + error * error, sums[1] + x * x];
        }
        *squares = [squares[0] + f64::from(sums[0]), squares[1] + f64::from(sums[1])];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn integers(shape: [usize; 2], values: &[i8]) -> HostTensor {
        let bytes: Vec<u8> = values.iter().map(|&v| v as u8).collect();
        HostTensor::new(DType::I8, shape, bytes.into()).unwrap()
    }

    #[test]
    fn each_row_has_its_own_scale() {
        let weight = integers([2, 3], &[1, -2, 127, -128, 0, 4]);
        let scale = HostTensor::from_f32([2], vec![0.5, 2.0]).unwrap();
        let wide = widen(&weight, &scale).unwrap();
        assert_eq!(wide.dtype(), DType::BF16);
        assert_eq!(wide.to_f32().unwrap().as_ref(), [0.5, -1.0, 63.5, -256.0, 0.0, 8.0]);
    }

    #[test]
    fn scales_must_be_one_a_row() {
        let shape = Shape::from([2, 2]);
        assert_eq!(row_scales(&shape, &HostTensor::zeros([3])).unwrap(), None);
        let flat = row_scales(&shape, &HostTensor::zeros([2, 1])).unwrap().unwrap();
        assert_eq!(flat.shape().dims(), [2]);
    }

    #[test]
    fn rounding_is_the_same_for_any_number_of_threads() {
        let values = (0..300 * 7).map(|i| (i * 7919 % 1001) as f32 - 500.0).collect();
        let weight = HostTensor::from_f32([300, 7], values).unwrap().to_dtype(DType::BF16).unwrap();
        let one = round(&weight, 1).unwrap();
        for threads in [0, 2, 9] {
            let many = round(&weight, threads).unwrap();
            assert!(many.weight == one.weight && many.scale == one.scale && many.squares == one.squares);
        }
        let (wide, error) =
            (widen(&one.weight, &one.scale).unwrap(), (one.squares[0] / one.squares[1]).sqrt());
        assert!((1e-4..5e-3).contains(&error), "{error}");
        for (row, found) in wide.to_f32().unwrap().chunks(7).enumerate() {
            let expected = weight.rows(row..row + 1).unwrap();
            for (found, expected) in found.iter().zip(expected.to_f32().unwrap().iter()) {
                // Half a step of 500 / 127, and the rounding to bf16.
                assert!((found - expected).abs() < 2.0 + 1.0, "{found}, expected {expected}");
            }
        }
    }

    #[test]
    fn the_blocks_are_taken_and_what_is_around_them_is_not() {
        assert!(takes("transformer_blocks.3.attn.to_q") && takes("single_transformer_blocks.0.attn.to_out"));
        for outside in ["x_embedder", "proj_out", "norm_out.linear", "single_stream_modulation.linear"] {
            assert!(!takes(outside), "{outside}");
        }
    }
}
