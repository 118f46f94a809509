use kiln_tensor::HostTensor;

use super::{tensor, values};
use crate::{AttentionSpec, Mask, Result, shapes};

fn rows(blocks: &[&HostTensor]) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    for block in blocks {
        all.extend(values(block)?);
    }
    Ok(all)
}

fn sees(mask: &Mask, query: usize, key: usize) -> bool {
    match mask {
        Mask::None => true,
        Mask::Causal { valid } => key <= query && key < *valid,
        Mask::Isolated { rows } => !rows.contains(&query) || rows.contains(&key),
    }
}

pub(super) fn attention(
    q: &[&HostTensor],
    k: &[&HostTensor],
    v: &[&HostTensor],
    spec: &AttentionSpec,
) -> Result<HostTensor> {
    let size = shapes::attention(q, k, v, spec)?;
    let dtype = q[0].dtype();
    let (q, k, v) = (rows(q)?, rows(k)?, rows(v)?);
    let dim = size.head_dim;
    let scale = 1.0 / (dim as f64).sqrt();
    let mut out = vec![0.0; q.len()];
    for query in 0..size.queries {
        for head in 0..size.heads {
            let kv_head = head / (size.heads / size.kv_heads);
            let at = (query * size.heads + head) * dim;
            let of_key = |key: usize| (key * size.kv_heads + kv_head) * dim;
            let q = &q[at..at + dim];
            let seen: Vec<usize> = (0..size.keys).filter(|&key| sees(&spec.mask, query, key)).collect();
            let score = |&key: &usize| {
                let k = &k[of_key(key)..][..dim];
                q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * scale
            };
            let scores: Vec<f64> = seen.iter().map(score).collect();
            // exp of a large score overflows; a common shift cancels in the quotient.
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            for (&key, score) in seen.iter().zip(&scores) {
                let weight = (score - largest).exp() / total;
                let v = &v[of_key(key)..][..dim];
                out[at..at + dim].iter_mut().zip(v).for_each(|(out, v)| *out += weight * v);
            }
        }
    }
    tensor(size.result(), dtype, out)
}
