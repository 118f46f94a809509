use kiln_ops::{AttentionSpec, Backend, Mask, Result};
use kiln_tensor::{HostTensor, Shape};

use super::List;
use crate::Tolerance;
use crate::bench::{Bench, Scenario};
use crate::random::{NORMAL, Values};

pub(super) fn list<B: Backend>(list: &mut List<B>) {
    let lengths = [1, 2, 17, 64, 65, 130];
    let plain = |heads, kv_heads, dim, lengths: &[[usize; 2]]| Attention {
        heads: [heads, kv_heads],
        dim,
        lengths: lengths.to_vec(),
        mask: |_| vec![Mask::None],
    };
    let square = lengths.map(|n| [n, n]);
    for dim in [32, 64, 128, 512] {
        list.add(&format!("attention/head_dim_{dim}"), plain(2, 2, dim, &square));
    }
    for dim in [1, 7, 17, 40, 96, 129] {
        list.add(&format!("attention/odd_head_dim_{dim}"), plain(3, 3, dim, &[[1, 1], [5, 9], [33, 34]]));
    }
    let oblong = [[1, 130], [130, 1], [3, 65], [65, 17], [40, 129], [0, 5]];
    list.add("attention/queries_differ_from_keys", plain(3, 3, 64, &oblong));
    list.add("attention/grouped_heads", plain(8, 2, 32, &[[17, 17], [3, 70]]));
    list.add("attention/one_key_head", plain(5, 1, 64, &[[17, 17], [3, 70]]));
    let causal = Attention { mask: causal, ..plain(4, 2, 32, &square) };
    list.add("attention/causal_over_padding", causal);
    // The width that has kernels of its own; tiles of keys that nobody sees, and blocks that end within one.
    let wide = [[40, 40], [130, 130], [300, 300]];
    list.add("attention/causal_head_dim_128", Attention { mask: self::causal, ..plain(4, 2, 128, &wide) });
    list.add("attention/isolated_head_dim_128", Attention { mask: isolated, ..plain(2, 1, 128, &wide) });
    list.add("attention/isolated_rows", Attention { mask: isolated, ..plain(2, 2, 64, &square) });
    list.add("attention/wide_heads_of_many_keys", plain(2, 1, 256, &[[70, 520]]));
    // Several tiles of queries and keys, the last ones cut short.
    list.add("attention/several_tiles_head_dim_64", plain(4, 2, 64, &[[70, 300], [129, 257]]));
    let causal = Attention { mask: self::causal, ..plain(2, 1, 64, &[[200, 200]]) };
    list.add("attention/causal_several_tiles_head_dim_64", causal);
    list.add("attention/full_size", plain(4, 4, 128, &[[256, 520]]));
    // More tiles of queries than a GPU has processors, and no multiple of that.
    list.add("attention/uneven_shares", plain(3, 1, 128, &[[300, 300], [260, 700]]));
    list.add("attention/full_size_uneven_shares", plain(67, 67, 128, &[[130, 290]]));
    list.add("attention/row_blocks", RowBlocks { dim: 32 });
    list.add("attention/row_blocks_head_dim_128", RowBlocks { dim: 128 });
    for (name, scores) in [("steep", Scores::Steep), ("all_high", Scores::High), ("all_low", Scores::Low)] {
        list.add(&format!("attention/scores_{name}"), LargeScores(scores));
    }
    list.add("attention/heavy_tailed_values", HeavyValues);
}

fn causal(keys: usize) -> Vec<Mask> {
    [1, keys / 2, keys.saturating_sub(1), keys]
        .into_iter()
        .filter(|&valid| valid > 0)
        .map(|valid| Mask::Causal { valid })
        .collect()
}

fn isolated(keys: usize) -> Vec<Mask> {
    [0..keys / 2, keys / 3..keys - keys / 4, keys - 1..keys, 0..keys, keys / 2..keys / 2]
        .into_iter()
        .map(|rows| Mask::Isolated { rows })
        .collect()
}

/// f32: the two products and the sum of the probabilities. bf16: probabilities may be rounded before they meet the
/// values.
fn tolerance<B: Backend>(t: &Bench<'_, B>, keys: usize, dim: usize, condition: f64) -> Tolerance {
    Tolerance::sum(keys + dim).conditioned(2.0 * condition).rounded_inside(t.dtype)
}

struct Attention {
    /// Query heads and key heads.
    heads: [usize; 2],
    dim: usize,
    /// Queries and keys.
    lengths: Vec<[usize; 2]>,
    /// The masks to try with that many keys.
    mask: fn(usize) -> Vec<Mask>,
}

impl Scenario for Attention {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let ([heads, kv_heads], dim) = (self.heads, self.dim);
        for &[queries, keys] in &self.lengths {
            let q = t.activation(NORMAL.times(2.0), [queries, heads * dim])?;
            let k = t.activation(NORMAL, [keys, kv_heads * dim])?;
            let v = t.activation(NORMAL, [keys, kv_heads * dim])?;
            for mask in (self.mask)(keys) {
                let label = format!("{queries} queries, {keys} keys, {mask:?}");
                let y = t.b.attention(&[&q], &[&k], &[&v], &AttentionSpec { heads, kv_heads, mask })?;
                t.put(label, &y, tolerance(t, keys, dim, 1.0))?;
            }
        }
        Ok(())
    }
}

/// Queries, keys and values in blocks that are cut at different rows.
struct RowBlocks {
    dim: usize,
}

impl Scenario for RowBlocks {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let (heads, kv_heads, dim) = (4, 2, self.dim);
        let cuts: [[&[usize]; 3]; 5] = [
            [&[30, 40], &[50, 20], &[50, 20]],
            [&[70], &[1, 69], &[69, 1]],
            [&[1, 33, 36], &[64, 6], &[17, 17, 36]],
            [&[35, 35], &[7, 7, 7, 49], &[70]],
            [&[10, 0, 60], &[0, 70], &[70, 0]],
        ];
        for [queries, keys, values] in cuts {
            let mut blocks = |lengths: &[usize], heads: usize| -> Result<Vec<B::Tensor>> {
                lengths.iter().map(|&n| t.activation(NORMAL, [n, heads * dim])).collect()
            };
            let q = blocks(queries, heads)?;
            let (k, v) = (blocks(keys, kv_heads)?, blocks(values, kv_heads)?);
            let masks = [Mask::None, Mask::Causal { valid: 37 }, Mask::Isolated { rows: 20..41 }];
            for mask in masks {
                let label = format!("q {queries:?}, k {keys:?}, v {values:?}, {mask:?}");
                let spec = AttentionSpec { heads, kv_heads, mask };
                let y = t.b.attention(&refs(&q), &refs(&k), &refs(&v), &spec)?;
                t.put(label, &y, tolerance(t, 70, dim, 1.0))?;
            }
        }
        Ok(())
    }
}

fn refs<T>(blocks: &[T]) -> Vec<&T> {
    blocks.iter().collect()
}

/// Scores whose exponential is not a number of f32.
#[derive(Clone, Copy)]
enum Scores {
    /// From −250 to 250: one key takes all.
    Steep,
    /// All near 140: without a shift, infinity over infinity.
    High,
    /// All near −140: without a shift, 0 over 0.
    Low,
}

struct LargeScores(Scores);

impl Scenario for LargeScores {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        for (dim, keys) in [(64, 17), (128, 130), (32, 65)] {
            let spec = AttentionSpec { heads: 2, kv_heads: 2, mask: Mask::None };
            let spread = if matches!(self.0, Scores::Steep) { 8.0 } else { 1.0 };
            let mut q = t.draw(NORMAL.times(spread), [33, 2 * dim]);
            let mut k = t.draw(NORMAL.times(spread), [keys, 2 * dim]);
            // One strong common component moves every score.
            let strong = (140.0 * (dim as f32).sqrt()).sqrt();
            match self.0 {
                Scores::Steep => {}
                Scores::High => (q, k) = (with_first(&q, dim, strong)?, with_first(&k, dim, strong)?),
                Scores::Low => (q, k) = (with_first(&q, dim, strong)?, with_first(&k, dim, -strong)?),
            }
            let (q, k) = (t.activation_of(&q)?, t.activation_of(&k)?);
            let v = t.activation(NORMAL, [keys, 2 * dim])?;
            let y = t.b.attention(&[&q], &[&k], &[&v], &spec)?;
            // A score of 140 is known to a few 1e-5 only, and so is its exponential.
            t.put(format!("{keys} keys of {dim}"), &y, tolerance(t, keys, dim, 40.0))?;
        }
        Ok(())
    }
}

/// `x` with the first element of every head replaced.
fn with_first(x: &HostTensor, dim: usize, value: f32) -> Result<HostTensor> {
    let values = x.to_f32()?.iter().enumerate().map(|(i, &x)| if i % dim == 0 { value } else { x }).collect();
    Ok(HostTensor::from_f32(Shape::from(x.shape()), values)?)
}

/// Some values far larger than the others, in a sum with every weight near 1 / keys.
struct HeavyValues;

impl Scenario for HeavyValues {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let small: Values = NORMAL.times(0.1);
        let spec = AttentionSpec { heads: 2, kv_heads: 2, mask: Mask::None };
        let q = t.activation(small, [19, 128])?;
        let k = t.activation(small, [67, 128])?;
        let v = t.activation(crate::random::HEAVY.plus(0.5), [67, 128])?;
        let y = t.b.attention(&[&q], &[&k], &[&v], &spec)?;
        t.put("19 queries, 67 keys", &y, tolerance(t, 67, 64, 1.0))
    }
}
