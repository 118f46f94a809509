//! Attention: head sizes, masks, shared key heads, row blocks and extreme scores.

use kiln_ops::{AttentionMask, AttentionSpec, Backend, HeadBlock, Result, RopeLayout, TrainingBackend};
use kiln_tensor::{DType, HostTensor, Shape};

use super::list::CaseList;
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario};
use crate::random::{Distribution, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let lengths = [1, 2, 17, 64, 65, 130];
    let unmasked = |heads, kv_heads, dim, lengths: &[[usize; 2]]| Attention {
        heads: [heads, kv_heads],
        dim,
        lengths: lengths.to_vec(),
        mask: |_| vec![AttentionMask::None],
    };
    let square = lengths.map(|n| [n, n]);
    for dim in [32, 64, 128, 512] {
        list.add(&format!("attention/head_dim_{dim}"), unmasked(2, 2, dim, &square));
    }
    for dim in [1, 7, 17, 40, 96, 129] {
        list.add(&format!("attention/odd_head_dim_{dim}"), unmasked(3, 3, dim, &[[1, 1], [5, 9], [33, 34]]));
    }
    let oblong = [[1, 130], [130, 1], [3, 65], [65, 17], [40, 129], [0, 5]];
    list.add("attention/queries_differ_from_keys", unmasked(3, 3, 64, &oblong));
    // One token's attention to all before it: its keys in one block, and in several if the GPU has room for them.
    let few = [[1, 1], [1, 33], [1, 450], [2, 131], [4, 70]];
    list.add("attention/few_queries_head_dim_128", unmasked(2, 1, 128, &few));
    list.add("attention/full_size_one_query", unmasked(32, 8, 128, &[[1, 700]]));
    list.add("attention/grouped_heads", unmasked(8, 2, 32, &[[17, 17], [3, 70]]));
    list.add("attention/one_key_head", unmasked(5, 1, 64, &[[17, 17], [3, 70]]));
    let causal = Attention { mask: causal, ..unmasked(4, 2, 32, &square) };
    list.add("attention/causal_over_padding", causal);
    // The head size with specialized kernels; tiles of keys that are fully masked, and blocks that end within a tile.
    let wide = [[40, 40], [130, 130], [300, 300]];
    list.add("attention/causal_head_dim_128", Attention { mask: self::causal, ..unmasked(4, 2, 128, &wide) });
    list.add("attention/isolated_head_dim_128", Attention { mask: isolated, ..unmasked(2, 1, 128, &wide) });
    list.add("attention/isolated_rows", Attention { mask: isolated, ..unmasked(2, 2, 64, &square) });
    list.add("attention/wide_heads_of_many_keys", unmasked(2, 1, 256, &[[70, 520]]));
    // Several tiles of queries and keys, the last ones incomplete.
    list.add("attention/several_tiles_head_dim_64", unmasked(4, 2, 64, &[[70, 300], [129, 257]]));
    list.add("attention/several_tiles_head_dim_96", unmasked(2, 1, 96, &[[70, 130]]));
    let causal = Attention { mask: self::causal, ..unmasked(2, 1, 64, &[[200, 200]]) };
    list.add("attention/causal_several_tiles_head_dim_64", causal);
    list.add("attention/full_size", unmasked(4, 4, 128, &[[256, 520]]));
    // More tiles of queries than a GPU has multiprocessors, and not a multiple.
    list.add("attention/uneven_shares", unmasked(3, 1, 128, &[[300, 300], [260, 700]]));
    list.add("attention/full_size_uneven_shares", unmasked(67, 67, 128, &[[130, 290]]));
    list.add("attention/row_blocks", RowBlocks { dim: 32 });
    list.add("attention/row_blocks_head_dim_128", RowBlocks { dim: 128 });
    let scores = [
        ("steep", Scores::Steep),
        ("all_high", Scores::High),
        ("all_low", Scores::Low),
        ("rising", Scores::Rising),
    ];
    for (name, scores) in scores {
        list.add(&format!("attention/scores_{name}"), LargeScores(scores));
    }
    list.add("attention/heavy_tailed_values", HeavyTailedValues);
    list.add("attention/eight_bits", EightBits);
    for (name, pairs) in [("adjacent", RopeLayout::Interleaved), ("halves", RopeLayout::HalfSplit)] {
        list.add(&format!("norm_rope_attention/{name}"), NormRopeAttention { pairs, eight_bits: false });
    }
    let rounded = NormRopeAttention { pairs: RopeLayout::Interleaved, eight_bits: true };
    list.add("norm_rope_attention/eight_bits", rounded);
    list.add_once("invalid_arguments/attention", Invalid);
}

fn causal(keys: usize) -> Vec<AttentionMask> {
    [1, keys / 2, keys.saturating_sub(1), keys]
        .into_iter()
        .filter(|&valid| valid > 0)
        .map(|valid| AttentionMask::Causal { valid })
        .collect()
}

fn isolated(keys: usize) -> Vec<AttentionMask> {
    [0..keys / 2, keys / 3..keys - keys / 4, keys - 1..keys, 0..keys, keys / 2..keys / 2]
        .into_iter()
        .map(|rows| AttentionMask::Isolated { rows })
        .collect()
}

/// f32: the two products and the sum of the probabilities. bf16: probabilities may also be rounded before the second
/// product.
fn tolerance<B: Backend>(t: &CaseRun<'_, B>, keys: usize, dim: usize, condition: f64) -> Tolerance {
    Tolerance::sum(keys + dim).conditioned(2.0 * condition).rounded_inside(t.dtype)
}

struct Attention {
    /// Numbers of query heads and key heads.
    heads: [usize; 2],
    dim: usize,
    /// Numbers of queries and keys.
    lengths: Vec<[usize; 2]>,
    /// Returns the masks to test with a number of keys.
    mask: fn(usize) -> Vec<AttentionMask>,
}

impl Scenario for Attention {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let ([heads, kv_heads], dim) = (self.heads, self.dim);
        for &[queries, keys] in &self.lengths {
            let q = t.activation(NORMAL.scaled(2.0), [queries, heads * dim])?;
            let k = t.activation(NORMAL, [keys, kv_heads * dim])?;
            let v = t.activation(NORMAL, [keys, kv_heads * dim])?;
            for mask in (self.mask)(keys) {
                let label = format!("{queries} queries, {keys} keys, {mask:?}");
                let y = t.b.attention(&[&q], &[&k], &[&v], &AttentionSpec::new(heads, kv_heads, mask))?;
                t.record(label, &y, tolerance(t, keys, dim, 1.0))?;
            }
        }
        Ok(())
    }
}

/// Queries, keys and values in blocks that are split at different rows.
struct RowBlocks {
    dim: usize,
}

impl Scenario for RowBlocks {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (heads, kv_heads, dim) = (4, 2, self.dim);
        let splits: [[&[usize]; 3]; 5] = [
            [&[30, 40], &[50, 20], &[50, 20]],
            [&[70], &[1, 69], &[69, 1]],
            [&[1, 33, 36], &[64, 6], &[17, 17, 36]],
            [&[35, 35], &[7, 7, 7, 49], &[70]],
            [&[10, 0, 60], &[0, 70], &[70, 0]],
        ];
        for [queries, keys, values] in splits {
            let mut blocks = |lengths: &[usize], heads: usize| -> Result<Vec<B::Tensor>> {
                lengths.iter().map(|&n| t.activation(NORMAL, [n, heads * dim])).collect()
            };
            let q = blocks(queries, heads)?;
            let (k, v) = (blocks(keys, kv_heads)?, blocks(values, kv_heads)?);
            let masks = [
                AttentionMask::None,
                AttentionMask::Causal { valid: 37 },
                AttentionMask::Isolated { rows: 20..41 },
            ];
            for mask in masks {
                let label = format!("q {queries:?}, k {keys:?}, v {values:?}, {mask:?}");
                let spec = AttentionSpec::new(heads, kv_heads, mask);
                let y = t.b.attention(&refs(&q), &refs(&k), &refs(&v), &spec)?;
                t.record(label, &y, tolerance(t, 70, dim, 1.0))?;
            }
        }
        Ok(())
    }
}

fn refs<T>(blocks: &[T]) -> Vec<&T> {
    blocks.iter().collect()
}

/// Scores whose exponential overflows or underflows in f32.
#[derive(Clone, Copy)]
enum Scores {
    /// From −250 to 250: one key gets all the weight.
    Steep,
    /// All near 140: infinity over infinity, unless the maximum is subtracted.
    High,
    /// All near −140: 0 over 0, unless the maximum is subtracted.
    Low,
    /// From far below zero to far above, key by key.
    Rising,
}

struct LargeScores(Scores);

impl Scenario for LargeScores {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for (dim, keys) in [(64, 17), (128, 130), (32, 65), (256, 776)] {
            let spec = AttentionSpec::new(2, 2, AttentionMask::None);
            let spread = if matches!(self.0, Scores::Steep) { 8.0 } else { 1.0 };
            let mut q = t.draw(NORMAL.scaled(spread), [33, 2 * dim]);
            let mut k = t.draw(NORMAL.scaled(spread), [keys, 2 * dim]);
            // A strong common component shifts every score.
            let strong = (140.0 * (dim as f32).sqrt()).sqrt();
            match self.0 {
                Scores::Steep => {}
                Scores::High => (q, k) = (with_first(&q, dim, |_| strong)?, with_first(&k, dim, |_| strong)?),
                Scores::Low => (q, k) = (with_first(&q, dim, |_| strong)?, with_first(&k, dim, |_| -strong)?),
                Scores::Rising => {
                    let rising = |row: usize| strong * (2.0 * row as f32 / (keys - 1) as f32 - 1.0);
                    (q, k) = (with_first(&q, dim, |_| strong)?, with_first(&k, dim, rising)?);
                }
            }
            let (q, k) = (t.upload_activation(&q)?, t.upload_activation(&k)?);
            let v = t.activation(NORMAL, [keys, 2 * dim])?;
            let y = t.b.attention(&[&q], &[&k], &[&v], &spec)?;
            // A score of 140 has an error of a few 1e-5, and so has its exponential.
            t.record(format!("{keys} keys of {dim}"), &y, tolerance(t, keys, dim, 40.0))?;
        }
        Ok(())
    }
}

/// Replaces the first element of every head, in each row by another value.
fn with_first(x: &HostTensor, dim: usize, value: impl Fn(usize) -> f32) -> Result<HostTensor> {
    let width = x.shape().last();
    let replaced = |(i, &x): (usize, &f32)| if i % dim == 0 { value(i / width) } else { x };
    let values = x.to_f32()?.iter().enumerate().map(replaced).collect();
    Ok(HostTensor::from_f32(Shape::from(x.shape()), values)?)
}

/// A few values far larger than the others, in sums with all weights near 1 / keys.
struct HeavyTailedValues;

impl Scenario for HeavyTailedValues {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let small: Distribution = NORMAL.scaled(0.1);
        let spec = AttentionSpec::new(2, 2, AttentionMask::None);
        let q = t.activation(small, [19, 128])?;
        let k = t.activation(small, [67, 128])?;
        let v = t.activation(crate::random::HEAVY_TAILED.shifted(0.5), [67, 128])?;
        let y = t.b.attention(&[&q], &[&k], &[&v], &spec)?;
        t.record("19 queries, 67 keys", &y, tolerance(t, 67, 64, 1.0))
    }
}

/// Attention that may round to 8 bits: keys with a common component, values with one strong channel, row blocks, masks, tiles
/// that end within a block, and more tiles of queries than a GPU has multiprocessors.
struct EightBits;

impl Scenario for EightBits {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let (dim, masked) = (128, |rows| AttentionMask::Isolated { rows });
        let all = [
            ([2, 2], [&[200][..], &[200]], AttentionMask::None),
            ([2, 1], [&[70, 90], &[130, 140]], AttentionMask::None),
            ([3, 3], [&[1, 5], &[1, 1]], AttentionMask::None),
            ([2, 1], [&[300], &[300]], masked(100..250)),
            ([2, 2], [&[200, 100], &[150, 150]], masked(0..130)),
            ([1, 1], [&[260], &[260]], AttentionMask::Causal { valid: 140 }),
            ([3, 1], [&[200], &[300]], AttentionMask::None),
        ];
        for ([heads, kv_heads], [queries, keys], mask) in all {
            let mut blocks = |lengths: &[usize],
                              heads: usize,
                              first: Option<f32>|
             -> Result<Vec<B::Tensor>> {
                let block = |&n: &usize| {
                    let x = t.draw(NORMAL, [n, heads * dim]);
                    t.upload_activation(&first.map_or(Ok(x.clone()), |first| with_first(&x, dim, |_| first))?)
                };
                lengths.iter().map(block).collect()
            };
            let q = blocks(queries, heads, None)?;
            let (k, v) = (blocks(keys, kv_heads, Some(20.0))?, blocks(keys, kv_heads, Some(-6.0))?);
            let label = format!("{heads} of {kv_heads} heads, queries {queries:?}, keys {keys:?}, {mask:?}");
            let spec = AttentionSpec { eight_bits: true, ..AttentionSpec::new(heads, kv_heads, mask) };
            let y = t.b.attention(&refs(&q), &refs(&k), &refs(&v), &spec)?;
            // f32 is not rounded.
            let allowed = match t.dtype {
                DType::BF16 => Tolerance { relative: 0.1, slack: 0.1, l2: 0.045 },
                _ => tolerance(t, keys.iter().sum(), dim, 1.0),
            };
            t.record(label, &y, allowed)?;
        }
        Ok(())
    }
}

/// Queries and keys of one and two blocks that come unnormed.
struct NormRopeAttention {
    pairs: RopeLayout,
    eight_bits: bool,
}

impl Scenario for NormRopeAttention {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let all: [(_, _, &[usize]); 4] = [
            ([5, 5], 128, &[140, 133]),
            ([4, 2], 128, &[300]),
            ([1, 1], 128, &[7, 1, 650]),
            ([2, 1], 32, &[9]),
        ];
        for ([heads, kv_heads], dim, lengths) in all {
            let (mut qk, mut v, mut ropes) = (Vec::new(), Vec::new(), Vec::new());
            for &tokens in lengths {
                let q = t.activation(NORMAL.scaled(3.0), [tokens, heads * dim])?;
                // Without their mean, keys need smaller scales.
                let k = t.activation(NORMAL.shifted(0.5), [tokens, kv_heads * dim])?;
                // Scores of about ½: larger ones would enlarge the error of rounded operands.
                let weight = NORMAL.scaled(0.15).shifted(0.7);
                qk.push(([q, k], [t.parameter(weight, [dim])?, t.parameter(weight, [dim])?]));
                v.push(t.activation(NORMAL, [tokens, kv_heads * dim])?);
                ropes.push(t.rope(tokens, dim / 2, self.pairs)?);
            }
            let block = |((qk, weights), rope)| -> HeadBlock<'_, B::Tensor> {
                let (qk, weights): (&[B::Tensor; 2], &[B::Tensor; 2]) = (qk, weights);
                HeadBlock { qk: qk.each_ref(), weights: weights.each_ref(), rope }
            };
            let blocks: Vec<_> =
                qk.iter().map(|(qk, weights)| (qk, weights)).zip(&ropes).map(block).collect();
            let mask = AttentionMask::None;
            let spec =
                AttentionSpec { eight_bits: self.eight_bits, ..AttentionSpec::new(heads, kv_heads, mask) };
            let y = t.b.norm_rope_attention(&blocks, &refs(&v), 1e-6, &spec)?;
            let allowed = match t.dtype {
                // Results are small: values of both signs cancel, their errors of rounding do not.
                DType::BF16 if self.eight_bits => Tolerance { relative: 0.1, slack: 0.25, l2: 0.045 },
                _ => tolerance(t, lengths.iter().sum(), dim, 2.0),
            };
            t.record(format!("{heads} of {kv_heads} heads of {dim}, {lengths:?}"), &y, allowed)?;
        }
        Ok(())
    }
}

/// Calls that every backend must reject with the same message.
struct Invalid;

impl Scenario for Invalid {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let spec = |heads, kv_heads, mask| AttentionSpec::new(heads, kv_heads, mask);
        let (x, longer, wider) =
            (t.zeros([5, 8], DType::F32)?, t.zeros([6, 8], DType::F32)?, t.zeros([5, 12], DType::F32)?);
        let (none, half, flat) =
            (t.zeros([0, 8], DType::F32)?, t.zeros([5, 8], DType::BF16)?, t.zeros([8], DType::F32)?);
        let plain = spec(2, 2, AttentionMask::None);
        let all: &[&B::Tensor] = &[&x];
        for (label, q, k, v) in [
            ("no queries at all", &[][..], all, all),
            ("no keys at all", all, &[], all),
            ("no values at all", all, all, &[]),
            ("keys without rows", all, &[&none], &[&none]),
            ("fewer keys than values", all, all, &[&longer]),
            ("wide keys", all, &[&wider], all),
            ("wide values", all, all, &[&wider]),
            ("query blocks of two widths", &[&x, &wider], all, all),
            ("bf16 keys", all, &[&half], all),
            ("bf16 values", all, all, &[&half]),
            ("a bf16 block of queries", &[&x, &half], all, all),
            ("a query vector", &[&flat], all, all),
        ] {
            t.reject(label, b.attention(q, k, v, &plain));
        }
        for (label, heads, kv_heads) in [
            ("no heads", 0, 0),
            ("no key heads", 2, 0),
            ("more key heads than heads", 2, 4),
            ("heads shared unevenly", 4, 3),
            ("columns shared unevenly", 3, 3),
            ("keys for one head of two", 2, 1),
        ] {
            t.reject(label, b.attention(all, all, all, &spec(heads, kv_heads, AttentionMask::None)));
        }
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 3..2;
        for (label, mask) in [
            ("no valid keys", AttentionMask::Causal { valid: 0 }),
            ("too many valid keys", AttentionMask::Causal { valid: 6 }),
            ("isolated rows past the end", AttentionMask::Isolated { rows: 2..6 }),
            ("isolated rows backwards", AttentionMask::Isolated { rows: backwards }),
        ] {
            t.reject(label, b.attention(all, all, all, &spec(2, 2, mask)));
        }
        for mask in [AttentionMask::Causal { valid: 2 }, AttentionMask::Isolated { rows: 0..2 }] {
            let label = format!("more keys than queries, {mask:?}");
            t.reject(label, b.attention(all, &[&longer], &[&longer], &spec(2, 2, mask)));
        }
        Ok(())
    }
}
