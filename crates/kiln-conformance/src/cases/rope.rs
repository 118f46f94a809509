//! Rotary embedding in both layouts, with and without the norm of heads.

use kiln_ops::{Backend, Result, RopeLayout, RopeTable, TrainingBackend};
use kiln_tensor::{DType, HostTensor};

use super::list::CaseList;
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    for (name, pairs) in [("adjacent", RopeLayout::Interleaved), ("halves", RopeLayout::HalfSplit)] {
        let sizes =
            |sizes: &[[usize; 3]]| NormRope { normed: true, pairs, values: NORMAL, sizes: sizes.to_vec() };
        let odd = [2, 4, 6, 10, 14, 18, 30, 34, 62, 66, 126, 130].map(|dim| [3, 2, dim]);
        list.add(&format!("norm_rope/{name}_odd_tails"), sizes(&odd));
        let common = [[1, 1, 128], [17, 3, 128], [5, 4, 64], [7, 5, 32], [33, 1, 32], [0, 2, 64]];
        list.add(&format!("norm_rope/{name}"), sizes(&common));
        let heavy = NormRope { values: HEAVY_TAILED, ..sizes(&common) };
        list.add(&format!("norm_rope/{name}_heavy_tailed"), heavy);
        list.add(&format!("norm_rope/{name}_full_size"), sizes(&[[256, 24, 128]]));
        let unnormed = |sizes: NormRope| NormRope { normed: false, ..sizes };
        list.add(&format!("norm_rope/{name}_without_norm_odd_tails"), unnormed(sizes(&odd)));
        list.add(&format!("norm_rope/{name}_without_norm"), unnormed(sizes(&common)));
        list.add(&format!("norm_rope/{name}_without_norm_full_size"), unnormed(sizes(&[[512, 32, 128]])));
    }
    list.add("norm_rope/sliced_table", SlicedTable);
    for (name, pairs) in [("adjacent", RopeLayout::Interleaved), ("halves", RopeLayout::HalfSplit)] {
        list.add(&format!("qk_norm_rope/{name}"), QkNormRope { normed: true, pairs });
        list.add(&format!("qk_norm_rope/{name}_without_norm"), QkNormRope { normed: false, pairs });
    }
    list.add_once("invalid_arguments/rope", Invalid);
}

struct NormRope {
    normed: bool,
    pairs: RopeLayout,
    values: Distribution,
    /// `[tokens, heads, head_dim]` each.
    sizes: Vec<[usize; 3]>,
}

impl Scenario for NormRope {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for &[tokens, heads, dim] in &self.sizes {
            let x = t.activation(self.values, [tokens, heads * dim])?;
            let weight = self.normed.then(|| t.parameter(NORMAL, [dim])).transpose()?;
            let rope = t.rope(tokens, dim / 2, self.pairs)?;
            let y = t.b.norm_rope(&x, weight.as_ref(), &rope, 1e-6)?;
            t.record(format!("{tokens} tokens, {heads}x{dim}"), &y, Tolerance::sum(dim).rounded(t.dtype))?;
        }
        Ok(())
    }
}

/// Queries and keys together, with equal and different numbers of heads, and a weight each.
struct QkNormRope {
    normed: bool,
    pairs: RopeLayout,
}

impl Scenario for QkNormRope {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for [tokens, heads, k_heads, dim] in
            [[17, 3, 3, 128], [5, 9, 2, 128], [4, 2, 11, 128], [7, 4, 2, 34], [0, 2, 2, 128]]
        {
            let q = t.activation(NORMAL, [tokens, heads * dim])?;
            let k = t.activation(HEAVY_TAILED, [tokens, k_heads * dim])?;
            let (q_weight, k_weight) = (t.parameter(NORMAL, [dim])?, t.parameter(NORMAL, [dim])?);
            let weights = self.normed.then_some([&q_weight, &k_weight]);
            let rope = t.rope(tokens, dim / 2, self.pairs)?;
            let [y, z] = t.b.qk_norm_rope([&q, &k], weights, &rope, 1e-6)?;
            t.record(format!("{tokens} queries, {heads}x{dim}"), &y, Tolerance::sum(dim).rounded(t.dtype))?;
            t.record(format!("{tokens} keys, {k_heads}x{dim}"), &z, Tolerance::sum(dim).rounded(t.dtype))?;
        }
        Ok(())
    }
}

/// A slice of a table, as one stream of a block uses it.
struct SlicedTable;

impl Scenario for SlicedTable {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let rope = t.rope(9, 16, RopeLayout::Interleaved)?.rows(t.b, 3..8)?;
        let x = t.activation(NORMAL, [5, 2 * 32])?;
        let weight = t.parameter(NORMAL, [32])?;
        let y = t.b.norm_rope(&x, Some(&weight), &rope, 1e-6)?;
        t.record("tokens 3..8 of 9", &y, Tolerance::sum(32).rounded(t.dtype))
    }
}

/// Calls that every backend must reject with the same message.
struct Invalid;

impl Scenario for Invalid {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, head) = (t.zeros([3, 8], DType::F32)?, t.zeros([4], DType::F32)?);
        let table = |shape: [usize; 2]| b.upload(&HostTensor::zeros(shape), DType::F32);
        let rope = |cos, sin| -> Result<RopeTable<B::Tensor>> {
            Ok(RopeTable { cos: table(cos)?, sin: table(sin)?, pairs: RopeLayout::Interleaved })
        };
        let good = rope([3, 2], [3, 2])?;
        t.reject("rope: an odd head", b.norm_rope(&x, Some(&t.zeros([1], DType::F32)?), &good, 1e-6));
        t.reject("rope: an empty head", b.norm_rope(&x, Some(&t.zeros([0], DType::F32)?), &good, 1e-6));
        t.reject(
            "rope: heads that don't fit",
            b.norm_rope(&x, Some(&t.zeros([6], DType::F32)?), &good, 1e-6),
        );
        t.reject("rope: a bf16 weight", b.norm_rope(&x, Some(&t.zeros([4], DType::BF16)?), &good, 1e-6));
        t.reject("rope: a weight matrix", b.norm_rope(&x, Some(&t.zeros([2, 2], DType::F32)?), &good, 1e-6));
        t.reject("rope: a short table", b.norm_rope(&x, Some(&head), &rope([2, 2], [2, 2])?, 1e-6));
        t.reject("rope: a wide table", b.norm_rope(&x, Some(&head), &rope([3, 4], [3, 4])?, 1e-6));
        t.reject("rope: no angles", b.norm_rope(&x, None, &rope([3, 0], [3, 0])?, 1e-6));
        t.reject("rope: angles that don't fit", b.norm_rope(&x, None, &rope([3, 3], [3, 3])?, 1e-6));
        t.reject("rope: a short table alone", b.norm_rope(&x, None, &rope([2, 2], [2, 2])?, 1e-6));
        t.reject("rope: other sines", b.norm_rope(&x, Some(&head), &rope([3, 2], [3, 1])?, 1e-6));
        Ok(())
    }
}
