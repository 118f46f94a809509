//! The gradients of attention.

use kiln_tensor::HostTensor;

use crate::reference::attention::{attends, concat_values};
use crate::reference::values::{tensor, values};
use crate::shapes::AttentionSize;
use crate::training::shapes;
use crate::{AttentionSpec, Result};

type T = HostTensor;

/// Elements of query `i` and of key `i`, by head.
struct Heads(AttentionSize);

impl Heads {
    fn query(&self, query: usize, head: usize) -> std::ops::Range<usize> {
        let start = (query * self.0.heads + head) * self.0.head_dim;
        start..start + self.0.head_dim
    }

    fn key(&self, key: usize, head: usize) -> std::ops::Range<usize> {
        let kv_head = head / (self.0.heads / self.0.kv_heads);
        let start = (key * self.0.kv_heads + kv_head) * self.0.head_dim;
        start..start + self.0.head_dim
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_scaled(to: &mut [f64], factor: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

pub(crate) fn attention_backward(
    dout: &[&T],
    q: &[&T],
    k: &[&T],
    v: &[&T],
    out: &T,
    lse: &T,
    spec: &AttentionSpec,
) -> Result<[T; 3]> {
    let size = shapes::attention_backward(dout, q, k, v, out, lse, spec)?;
    let dtype = q[0].dtype();
    let (queries, keys, heads) = (size.queries, size.keys, size.heads);
    let (dims, kv_dims) = (size.result(), [keys, size.kv_heads * size.head_dim]);
    let scale = 1.0 / (size.head_dim as f64).sqrt();
    let at = Heads(size);
    let (q, k, v, dout) = (concat_values(q)?, concat_values(k)?, concat_values(v)?, concat_values(dout)?);
    let (out, lse) = (values(out)?, values(lse)?);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for query in 0..queries {
        for head in 0..heads {
            let row = at.query(query, head);
            let delta = dot(&dout[row.clone()], &out[row.clone()]);
            for key in (0..keys).filter(|&key| attends(&spec.mask, query, key)) {
                let col = at.key(key, head);
                let score = scale * dot(&q[row.clone()], &k[col.clone()]);
                let p = (score - lse[query * heads + head]).exp();
                add_scaled(&mut dv[col.clone()], p, &dout[row.clone()]);
                let ds = p * (dot(&dout[row.clone()], &v[col.clone()]) - delta);
                add_scaled(&mut dq[row.clone()], scale * ds, &k[col.clone()]);
                add_scaled(&mut dk[col], scale * ds, &q[row.clone()]);
            }
        }
    }
    Ok([tensor(dims, dtype, dq)?, tensor(kv_dims, dtype, dk)?, tensor(kv_dims, dtype, dv)?])
}
