//! LoKr: `y = x · Wᵀ + s · x · (w1 ⊗ w2)ᵀ`.
//!
//! With `w1` `[l, m]`, `w2` `[k, n]` and a row of `x` as a matrix `X` `[m, n]`, the sum's second term is `w1 · X · w2ᵀ`, `[l, k]`:
//! a product with `w2` of rows of length `n`, then one with `w1` from the left. The Kronecker product is never formed.

use kiln_nn::transformer::training::LayerStack;
use kiln_ops::{Tensor as _, TrainingBackend};

use super::set::{AdapterSet, LayerAdapter, Lokr};
use super::targets::TargetLayer;

impl Lokr {
    pub(super) fn new(target: &TargetLayer, factor: Option<usize>) -> Lokr {
        let [l, k] = factorize(target.layer.rows, factor);
        let [m, n] = factorize(target.layer.cols, factor);
        Lokr { outer: [l, m], inner: [k, n], low_rank: 2 * target.rank < k.max(n) }
    }
}

/// Splits a width in two factors, the smaller first: `factor` and the rest if it divides, else as evenly as possible with the
/// first at most `factor`.
fn factorize(width: usize, factor: Option<usize>) -> [usize; 2] {
    if let Some(factor) = factor.filter(|f| *f > 0 && width.is_multiple_of(*f)) {
        return [factor, width / factor];
    }
    let largest = factor.unwrap_or(width);
    let divides = |m: &usize| width.is_multiple_of(*m);
    let first = (1..=largest).take_while(|m| m * m <= width).filter(divides).last().unwrap_or(1);
    [first, width / first]
}

/// The intermediate products of one adapter.
struct Products<T> {
    /// `x` as rows of `n`.
    x: T,
    /// With a low-rank `w2`: times `w2_bᵀ`.
    thin: Option<T>,
    /// Times `w2ᵀ`: rows of `k`.
    t: T,
}

fn products<B: TrainingBackend>(
    b: &B,
    adapter: &LayerAdapter<B>,
    lokr: &Lokr,
    x: &B::Tensor,
) -> kiln_ops::Result<Products<B::Tensor>> {
    let ([_, m], [_, n]) = (lokr.outer, lokr.inner);
    let x = b.reshape(x, [x.shape().rows() * m, n].into())?;
    let value = |i: usize| &adapter.params[i].value;
    if lokr.low_rank {
        let thin = b.matmul_nt(&x, value(2), 1.0, None)?;
        let t = b.matmul_nt(&thin, value(1), 1.0, None)?;
        return Ok(Products { x, thin: Some(thin), t });
    }
    let t = b.matmul_nt(&x, value(1), 1.0, None)?;
    Ok(Products { x, thin: None, t })
}

impl<B: TrainingBackend> AdapterSet<B> {
    pub(super) fn lokr_forward(
        &self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        widths: &[usize],
    ) -> Result<Vec<B::Tensor>, kiln_nn::Error> {
        let rows: Vec<usize> = layer.iter().map(|(_, rows)| *rows).collect();
        let mut ys = b.linear_low_rank(x, w, &[], &rows)?.ys;
        for ((name, rows), y) in layer.iter().zip(&mut ys) {
            let Some(adapter) = self.layers.get(name) else { continue };
            let Some(lokr) = &adapter.lokr else { continue };
            let products = products(b, adapter, lokr, x)?;
            let mixed = b.mix_rows(&products.t, &adapter.params[0].value, false)?;
            let mixed = b.reshape(&mixed, [x.shape().rows(), *rows].into())?;
            *y = b.add_scaled(y, &mixed, adapter.scale())?;
        }
        if rows == widths {
            return Ok(ys);
        }
        let y = if ys.len() == 1 { ys.remove(0) } else { b.concat_columns(&ys.iter().collect::<Vec<_>>())? };
        Ok(b.split_columns(&y, widths)?)
    }

    pub(super) fn lokr_backward(
        &mut self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        dys: &[&B::Tensor],
        needs_dx: bool,
    ) -> Result<Option<B::Tensor>, kiln_nn::Error> {
        let mut dx = if needs_dx { Some(b.linear_backward(dys, w, None)?) } else { None };
        let rows: Vec<usize> = layer.iter().map(|(_, rows)| *rows).collect();
        let same =
            rows.len() == dys.len() && rows.iter().zip(dys).all(|(rows, dy)| *rows == dy.shape().last());
        let parts = if same {
            dys.iter().map(|dy| (*dy).clone()).collect()
        } else {
            b.split_columns(&b.concat_columns(dys)?, &rows)?
        };
        for ((name, _), dy) in layer.iter().zip(&parts) {
            let Some(adapter) = self.layers.get_mut(name) else { continue };
            let Some(lokr) = &adapter.lokr else { continue };
            let ([l, _], [k, n]) = (lokr.outer, lokr.inner);
            let scale = adapter.scale();
            let products = products(b, adapter, lokr, x)?;
            let dy = b.reshape(dy, [dy.shape().rows() * l, k].into())?;
            let value = |i: usize| &adapter.params[i].value;
            let earlier = |i: usize| adapter.params[i].grad.as_ref();
            let mut gradients = vec![b.mix_rows_gradient(&dy, &products.t, lokr.outer, scale, earlier(0))?];
            let dt = b.mix_rows(&dy, value(0), true)?;
            // The gradient with respect to `x`, as rows of `n`, adds to that through the weight.
            let flat = |dx: &B::Tensor| b.reshape(dx, [products.x.shape().rows(), n].into());
            let through = match &products.thin {
                Some(thin) => {
                    gradients.push(b.matmul_tn(&dt, thin, scale, earlier(1))?);
                    let d_thin = b.matmul_nn(&dt, value(1), scale, None)?;
                    gradients.push(b.matmul_tn(&d_thin, &products.x, 1.0, earlier(2))?);
                    match &dx {
                        Some(dx) => Some(b.matmul_nn(&d_thin, value(2), 1.0, Some(&flat(dx)?))?),
                        None => None,
                    }
                }
                None => {
                    gradients.push(b.matmul_tn(&dt, &products.x, scale, earlier(1))?);
                    match &dx {
                        Some(dx) => Some(b.matmul_nn(&dt, value(1), scale, Some(&flat(dx)?))?),
                        None => None,
                    }
                }
            };
            if let Some(through) = through {
                dx = Some(b.reshape(&through, x.shape().clone())?);
            }
            for (param, gradient) in adapter.params.iter_mut().zip(gradients) {
                param.grad = Some(gradient);
            }
        }
        Ok(dx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_split_as_in_peft() {
        assert_eq!(factorize(3072, None), [48, 64]);
        assert_eq!(factorize(128, None), [8, 16]);
        assert_eq!(factorize(6, None), [2, 3]);
        assert_eq!(factorize(7, None), [1, 7]);
        assert_eq!(factorize(96, Some(8)), [8, 12]);
        assert_eq!(factorize(96, Some(9)), [8, 12]);
    }
}
