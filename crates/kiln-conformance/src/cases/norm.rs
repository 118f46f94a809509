//! RMS norm, adaptive layer norm and group norm.

use kiln_ops::{Activation, Backend, Result, RowGroups, TrainingBackend};
use kiln_tensor::{DType, HostTensor};

use super::list::{CaseList, ODD};
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let odd = || ODD.map(|dim| [5, dim]).to_vec();
    list.add("rms_norm/odd_tails", RmsNorm { values: NORMAL, sizes: odd(), eps: 1e-6 });
    list.add("rms_norm/heavy_tailed", RmsNorm { values: HEAVY_TAILED, sizes: odd(), eps: 1e-6 });
    list.add("rms_norm/tiny", RmsNorm { values: NORMAL.scaled(1e-20), sizes: odd(), eps: 1e-6 });
    list.add("rms_norm/huge", RmsNorm { values: NORMAL.scaled(1e15), sizes: odd(), eps: 1e-6 });
    list.add("rms_norm/eps_counts", RmsNorm { values: NORMAL, sizes: odd(), eps: 0.5 });
    list.add("rms_norm/no_rows", RmsNorm { values: NORMAL, sizes: vec![[0, 8]], eps: 1e-6 });
    list.add("rms_norm/many_rows", RmsNorm { values: NORMAL, sizes: vec![[1501, 264]], eps: 1e-6 });
    list.add("rms_norm/full_size", RmsNorm { values: HEAVY_TAILED, sizes: vec![[512, 3072]], eps: 1e-6 });

    let rows = || ODD.map(|dim| (dim, vec![1, 4, 2])).to_vec();
    list.add("ada_layer_norm/odd_tails", AdaLayerNorm { values: NORMAL, sizes: rows(), ratio: 1.0 });
    list.add("ada_layer_norm/heavy_tailed", AdaLayerNorm { values: HEAVY_TAILED, sizes: rows(), ratio: 1.0 });
    list.add("ada_layer_norm/tiny", AdaLayerNorm { values: NORMAL.scaled(1e-12), sizes: rows(), ratio: 1.0 });
    list.add(
        "ada_layer_norm/one_group",
        AdaLayerNorm { values: NORMAL, sizes: vec![(65, vec![3])], ratio: 1.0 },
    );
    // A variance computed as mean(x²) − mean(x)² has no correct digits here.
    let far = NORMAL.scaled(2.0).shifted(1000.0);
    let wide = vec![(65, vec![3]), (1024, vec![2]), (3072, vec![1])];
    list.add("ada_layer_norm/large_mean", AdaLayerNorm { values: far, sizes: wide, ratio: 500.0 });
    list.add("ada_layer_norm/constant_rows", ConstantRows);
    let many = vec![(264, vec![1501, 2])];
    list.add("ada_layer_norm/many_rows", AdaLayerNorm { values: NORMAL, sizes: many, ratio: 1.0 });
    let full = vec![(3072, vec![200, 56])];
    list.add("ada_layer_norm/full_size", AdaLayerNorm { values: HEAVY_TAILED, sizes: full, ratio: 1.0 });

    let base = GroupNorm { values: NORMAL, sizes: group_sizes(), f: None, ratio: 1.0 };
    list.add("group_norm/odd_sizes", base.clone());
    for (name, f) in [
        ("silu", Activation::Silu),
        ("relu", Activation::Relu),
        ("soft_clamp", Activation::SoftClamp),
        ("gelu", Activation::Gelu),
    ] {
        list.add(&format!("group_norm/then_{name}"), GroupNorm { f: Some(f), ..base.clone() });
    }
    list.add("group_norm/heavy_tailed", GroupNorm { values: HEAVY_TAILED, ..base.clone() });
    list.add("group_norm/large_mean", GroupNorm { values: far, ratio: 500.0, ..base.clone() });
    // The second exceeds what a large GPU can process in one wave.
    let sizes = vec![([64, 48, 128], 32), ([193, 199, 128], 32)];
    let full = GroupNorm { sizes, f: Some(Activation::Silu), ..base };
    list.add("group_norm/full_size", full);
    list.add_once("invalid_arguments/norms", Invalid);
}

struct RmsNorm {
    values: Distribution,
    sizes: Vec<[usize; 2]>,
    eps: f32,
}

impl Scenario for RmsNorm {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &[rows, dim] in &self.sizes {
            let x = t.activation(self.values, [rows, dim])?;
            let weight = t.parameter(NORMAL, [dim])?;
            let y = t.b.rms_norm(&x, &weight, self.eps)?;
            t.record(format!("{rows}x{dim}"), &y, Tolerance::sum(dim).rounded(t.dtype))?;
        }
        Ok(())
    }
}

struct AdaLayerNorm {
    values: Distribution,
    /// Columns, and the length of each group of rows.
    sizes: Vec<(usize, Vec<usize>)>,
    /// Mean over standard deviation: how much larger the rounding of the mean is than that of the deviations.
    ratio: f64,
}

impl Scenario for AdaLayerNorm {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for (dim, lengths) in &self.sizes {
            let groups = RowGroups::from_lengths(lengths);
            let x = t.activation(self.values, [groups.rows(), *dim])?;
            let scale = t.parameter(NORMAL, [groups.count(), *dim])?;
            let shift = t.parameter(NORMAL, [groups.count(), *dim])?;
            let y = t.b.ada_layer_norm(&x, &scale, &shift, &groups, 1e-6)?;
            let tolerance = Tolerance::sum(*dim).conditioned(self.ratio).rounded(t.dtype);
            t.record(format!("{}x{dim}", groups.rows()), &y, tolerance)?;
        }
        Ok(())
    }
}

/// Rows without variance: only eps prevents a division by zero.
struct ConstantRows;

impl Scenario for ConstantRows {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let x = HostTensor::from_f32([3, 64], [3.0, 0.0, -0.5].map(|v| [v; 64]).concat())?;
        let x = t.upload_activation(&x)?;
        let scale = t.parameter(NORMAL, [1, 64])?;
        let shift = t.parameter(NORMAL, [1, 64])?;
        let y = t.b.ada_layer_norm(&x, &scale, &shift, &RowGroups::single(3), 1e-6)?;
        t.record("3x64", &y, Tolerance::ELEMENTWISE.rounded(t.dtype))
    }
}

/// Returns `[height, width, channels]` and groups: one channel per group, odd groups, one group, one pixel.
fn group_sizes() -> Vec<([usize; 3], usize)> {
    vec![
        ([3, 5, 32], 32),
        ([7, 3, 64], 32),
        ([5, 5, 96], 32),
        ([4, 9, 33], 3),
        ([3, 3, 6], 3),
        ([1, 17, 256], 4),
        ([9, 1, 7], 1),
        ([1, 1, 64], 4),
        ([1, 1, 8], 8),
        ([31, 33, 36], 4),
    ]
}

#[derive(Clone)]
struct GroupNorm {
    values: Distribution,
    sizes: Vec<([usize; 3], usize)>,
    f: Option<Activation>,
    /// As in [`AdaLayerNorm`].
    ratio: f64,
}

impl Scenario for GroupNorm {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &(size @ [h, w, c], groups) in &self.sizes {
            let x = t.activation(self.values, size)?;
            let (weight, bias) = (t.parameter(NORMAL, [c])?, t.parameter(NORMAL, [c])?);
            let y = t.b.group_norm(&x, groups, &weight, &bias, 1e-5, self.f)?;
            let tolerance = Tolerance::sum(h * w * c / groups).conditioned(self.ratio).rounded(t.dtype);
            t.record(format!("{h}x{w}x{c} in {groups} groups"), &y, tolerance)?;
        }
        Ok(())
    }
}

/// Calls that every backend must reject with the same message.
struct Invalid;

impl Scenario for Invalid {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, flat) = (t.zeros([3, 8], DType::F32)?, t.zeros([8], DType::F32)?);
        let one = RowGroups::single(3);
        let (row, short) = (t.zeros([1, 8], DType::F32)?, t.zeros([7], DType::F32)?);
        t.reject("rms: a short weight", b.rms_norm(&x, &short, 1e-6));
        t.reject("rms: a weight row", b.rms_norm(&x, &row, 1e-6));
        t.reject("rms: a bf16 weight", b.rms_norm(&x, &t.zeros([8], DType::BF16)?, 1e-6));
        t.reject("rms: a vector", b.rms_norm(&flat, &flat, 1e-6));
        t.reject(
            "layer: too few rows in groups",
            b.ada_layer_norm(&x, &row, &row, &RowGroups::single(2), 1e-6),
        );
        t.reject("layer: no groups", b.ada_layer_norm(&x, &row, &row, &RowGroups::from_lengths(&[]), 1e-6));
        t.reject(
            "layer: a scale for two",
            b.ada_layer_norm(&x, &t.zeros([2, 8], DType::F32)?, &row, &one, 1e-6),
        );
        t.reject(
            "layer: a narrow shift",
            b.ada_layer_norm(&x, &row, &t.zeros([1, 7], DType::F32)?, &one, 1e-6),
        );
        t.reject(
            "layer: a bf16 shift",
            b.ada_layer_norm(&x, &row, &t.zeros([1, 8], DType::BF16)?, &one, 1e-6),
        );
        t.reject("layer: a vector", b.ada_layer_norm(&flat, &row, &row, &one, 1e-6));

        let (image, half) = (t.zeros([2, 2, 8], DType::F32)?, t.zeros([8], DType::BF16)?);
        let group =
            |x, groups, weight, bias| b.group_norm(x, groups, weight, bias, 1e-6, Some(Activation::Silu));
        t.reject("group: no groups", group(&image, 0, &flat, &flat));
        t.reject("group: uneven groups", group(&image, 3, &flat, &flat));
        t.reject("group: a short weight", group(&image, 4, &short, &flat));
        t.reject("group: a short bias", group(&image, 4, &flat, &short));
        t.reject("group: a bf16 bias", group(&image, 4, &flat, &half));
        t.reject("group: a matrix", group(&x, 4, &flat, &flat));
        Ok(())
    }
}
