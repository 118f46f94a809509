//! What is slow says so: large products that no fast kernel takes, noted once for each reason.

use std::collections::BTreeSet;
use std::sync::Mutex;

use kiln_base::lock;
use kiln_tensor::DType;

use crate::gemm::shape::GemmShape;

/// Multiplications from which a slow product takes noticeable time. An emulated GPU takes it for fewer.
const LARGE: usize = if cfg!(test) { 1 << 18 } else { 1 << 30 };

/// What this process has told so far.
static TOLD: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// The reasons that were met on a GPU and are not told yet.
#[derive(Default)]
pub(crate) struct SlowProducts {
    found: Mutex<BTreeSet<&'static str>>,
}

impl SlowProducts {
    /// Notes a product that a kernel of last resort computes.
    pub fn add(&self, shape: &GemmShape, has_cublaslt: bool) {
        let size = shape.rows.saturating_mul(shape.n).saturating_mul(shape.k).saturating_mul(shape.batch);
        if size >= LARGE {
            lock(&self.found).insert(reason(shape, has_cublaslt));
        }
    }

    /// The reasons since the last call that the process has not told before, as notes for the user.
    pub fn take(&self) -> Vec<String> {
        let found = std::mem::take(&mut *lock(&self.found));
        let mut told = lock(&TOLD);
        found.into_iter().filter(|reason| told.insert(reason)).map(str::to_owned).collect()
    }
}

/// Why no fast kernel takes a product, and what helps.
fn reason(shape: &GemmShape, has_cublaslt: bool) -> &'static str {
    match shape.dtype {
        DType::F32 if !has_cublaslt => {
            "products in f32 are slow on this GPU without cuBLASLt: compute in bf16, or install cuBLASLt"
        }
        DType::F32 => {
            "products in f32 of layers whose sizes are no multiples of 4 are slow on this GPU: compute in bf16"
        }
        DType::I8 if !shape.n.is_multiple_of(2) => {
            "products in int8 of layers with an odd number of outputs are slow on this GPU: compute in bf16"
        }
        DType::F8E4M3 if !shape.n.is_multiple_of(2) => {
            "products in fp8 of layers with an odd number of outputs are slow on this GPU: compute in bf16"
        }
        // Packed: nvfp4.
        DType::U8 => "products in nvfp4 of layers with an odd number of outputs are slow on this GPU",
        DType::I8 => "products in int8 of layers of these sizes are slow on this GPU: compute in bf16",
        DType::F8E4M3 => "products in fp8 of layers of these sizes are slow on this GPU: compute in bf16",
        _ => {
            "products of layers whose sizes are no multiples of 8 are slow on this GPU: other sizes are faster"
        }
    }
}

#[cfg(test)]
mod tests {
    use kiln_ops::Residency;
    use kiln_tensor::{HostLinear, HostTensor, Rotation};

    use super::*;
    use crate::context::Context;
    use crate::ops;
    use crate::options::Options;
    use crate::tensor::CudaTensor;

    #[test]
    fn slow_products_are_noted_once_and_only_if_they_are_large() {
        let slow = SlowProducts::default();
        let product = |rows: usize| GemmShape::packed([rows, 64, 64], DType::F32, DType::F32, false);
        slow.add(&product(LARGE / 64 / 64 - 1), false);
        assert!(slow.take().is_empty());
        slow.add(&product(LARGE / 64 / 64), false);
        slow.add(&product(LARGE), false);
        let notes = slow.take();
        assert!(notes.len() == 1 && notes[0].contains("f32"), "{notes:?}");
        let other = SlowProducts::default();
        other.add(&product(LARGE), false);
        assert!(other.take().is_empty(), "told already");
    }

    #[test]
    fn slow_products_of_layers_are_noted() {
        let options = Options { disable_cublaslt: true, ..Options::default() };
        let Some(cx) = Context::new(&options).inspect_err(|e| println!("skipped: no GPU: {e}")).ok() else {
            return;
        };
        let found = |outputs: usize, dtype: DType, quantize: &dyn Fn(HostLinear) -> HostLinear| {
            let (rows, depth) = (64, 64);
            let values = |count: usize| (0..count).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>();
            let dense = HostTensor::from_f32([outputs, depth], values(outputs * depth)).unwrap();
            let linear = quantize(HostLinear::dense(vec![dense]).unwrap());
            let w = ops::load_weight(&cx, linear, Residency::Device).unwrap();
            let x = HostTensor::from_f32([rows, depth], values(rows * depth)).unwrap();
            let x: CudaTensor = ops::upload(&cx, &x, dtype).unwrap();
            ops::linear(&cx, &x, &w).unwrap();
            std::mem::take(&mut *lock(&cx.shared().slow.found)).into_iter().collect::<String>()
        };
        assert!(
            found(128, DType::F32, &|linear| linear).contains("f32 are slow on this GPU without cuBLASLt")
        );
        assert_eq!(found(128, DType::BF16, &|linear| linear), "");
        assert!(found(129, DType::BF16, &|linear| linear).contains("multiples of 8"));
        let int8 = |linear: HostLinear| {
            let (outputs, depth) = (linear.rows(), linear.cols());
            let rows =
                HostTensor::new(DType::I8, [outputs, depth], vec![1u8; outputs * depth].into()).unwrap();
            HostLinear::int8(
                vec![rows],
                vec![HostTensor::from_f32([outputs], vec![1.0; outputs]).unwrap()],
                Rotation::None,
            )
            .unwrap()
        };
        assert_eq!(found(128, DType::BF16, &int8), "");
        assert!(found(129, DType::BF16, &int8).contains("int8 of layers with an odd number"));
        if cx.gpu().has_fp8() {
            let fp8 = |linear: HostLinear| linear.with_fp8_matmul().unwrap();
            assert_eq!(found(128, DType::BF16, &fp8), "");
            assert!(found(129, DType::BF16, &fp8).contains("fp8 of layers with an odd number"));
        }
    }
}
