use kiln_tensor::{DType, HostTensor};

use super::values::{tensor, values};
use crate::{AttentionMask, AttentionSpec, Result, shapes};

/// The elements of row blocks.
pub(super) fn concat_values(blocks: &[&HostTensor]) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    for block in blocks {
        all.extend(values(block)?);
    }
    Ok(all)
}

pub(super) fn attends(mask: &AttentionMask, query: usize, key: usize) -> bool {
    match mask {
        AttentionMask::None => true,
        AttentionMask::Causal { valid } => key <= query && key < *valid,
        AttentionMask::Isolated { rows } => !rows.contains(&query) || rows.contains(&key),
    }
}

pub(super) fn attention(
    q: &[&HostTensor],
    k: &[&HostTensor],
    v: &[&HostTensor],
    spec: &AttentionSpec,
) -> Result<HostTensor> {
    let [out, _] = attention_lse(q, k, v, spec)?;
    Ok(out)
}

pub(super) fn attention_lse(
    q: &[&HostTensor],
    k: &[&HostTensor],
    v: &[&HostTensor],
    spec: &AttentionSpec,
) -> Result<[HostTensor; 2]> {
    let size = shapes::attention(q, k, v, spec)?;
    let dtype = q[0].dtype();
    let (q, k, v) = (concat_values(q)?, concat_values(k)?, concat_values(v)?);
    let dim = size.head_dim;
    let scale = 1.0 / (dim as f64).sqrt();
    let (mut out, mut lse) = (vec![0.0; q.len()], Vec::with_capacity(size.queries * size.heads));
    for query in 0..size.queries {
        for head in 0..size.heads {
            let kv_head = head / (size.heads / size.kv_heads);
            let start = (query * size.heads + head) * dim;
            let key_start = |key: usize| (key * size.kv_heads + kv_head) * dim;
            let q = &q[start..start + dim];
            let attended: Vec<usize> =
                (0..size.keys).filter(|&key| attends(&spec.mask, query, key)).collect();
            let score = |&key: &usize| {
                let k = &k[key_start(key)..][..dim];
                q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * scale
            };
            let scores: Vec<f64> = attended.iter().map(score).collect();
            // Large scores overflow `exp`; a common shift cancels in the quotient.
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            lse.push(largest + total.ln());
            for (&key, score) in attended.iter().zip(&scores) {
                let weight = (score - largest).exp() / total;
                let v = &v[key_start(key)..][..dim];
                out[start..start + dim].iter_mut().zip(v).for_each(|(out, v)| *out += weight * v);
            }
        }
    }
    Ok([tensor(size.result(), dtype, out)?, tensor([size.queries, size.heads], DType::F32, lse)?])
}
