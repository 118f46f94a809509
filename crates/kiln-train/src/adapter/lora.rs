//! LoRA, `y = x · Wᵀ + s · (x' · Aᵀ) · Bᵀ` with `x'` the input after dropout, and DoRA, which multiplies each output of that sum
//! by `magnitude / ‖row of W + s · B · A‖`. The norm counts as a constant in DoRA's gradient, as in its paper and in PEFT.

use kiln_nn::transformer::training::LayerStack;
use kiln_ops::training::LowRank;
use kiln_ops::{Tensor as _, TrainingBackend};
use kiln_tensor::{DType, HostTensor};

use super::init::layer_seed;
use super::set::{AdapterSet, DoraScale, LayerAdapter, LoraSaved};
use crate::{AdapterKind, Result};

fn updates<'a, B: TrainingBackend>(
    parts: &[(usize, &str, &'a LayerAdapter<B>)],
    inputs: &'a [Option<B::Tensor>],
) -> Vec<LowRank<'a, B::Tensor>> {
    let pairs = parts.iter().zip(inputs);
    let update = pairs.map(|(&(first, _, adapter), input)| LowRank {
        first,
        down: &adapter.params[0].value,
        up: &adapter.params[1].value,
        scale: adapter.scale(),
        input: input.as_ref(),
    });
    update.collect()
}

impl<B: TrainingBackend> AdapterSet<B> {
    /// The inputs of the parts' adapters after dropout; `None` without dropout.
    fn dropped(
        &self,
        b: &B,
        parts: &[(usize, &str, &LayerAdapter<B>)],
        x: &B::Tensor,
    ) -> Result<Vec<Option<B::Tensor>>> {
        let drop = |(_, name, _): &(usize, &str, &LayerAdapter<B>)| match self.dropout_seed {
            Some(seed) if self.dropout > 0.0 => {
                Ok(Some(b.dropout(x, self.dropout, layer_seed(seed, name))?))
            }
            _ => Ok(None),
        };
        parts.iter().map(drop).collect()
    }

    pub(super) fn lora_forward(
        &self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        widths: &[usize],
    ) -> Result<(Vec<B::Tensor>, LoraSaved<B>), kiln_nn::Error> {
        let parts: Vec<_> = self.parts(layer).collect();
        let inputs = self.dropped(b, &parts, x).map_err(model_error)?;
        let updates = updates(&parts, &inputs);
        if self.kind == AdapterKind::Lora {
            let output = b.linear_low_rank(x, w, &updates, widths)?;
            return Ok((output.ys, LoraSaved { inner: output.inner, unscaled: None }));
        }
        let scale = self.dora_scale(b, layer, w).map_err(model_error)?;
        let mut output = b.linear_low_rank(x, w, &updates, &part_rows(layer))?;
        let unscaled = match output.ys.len() {
            1 => output.ys.remove(0),
            _ => b.concat_columns(&output.ys.iter().collect::<Vec<_>>())?,
        };
        let y = b.affine(&unscaled, &scale.factor, &scale.zeros)?;
        let ys = if widths.len() == 1 { vec![y] } else { b.split_columns(&y, widths)? };
        Ok((ys, LoraSaved { inner: output.inner, unscaled: Some(unscaled) }))
    }

    #[expect(clippy::too_many_arguments, reason = "the layer, its input and the gradients of its outputs")]
    pub(super) fn lora_backward(
        &mut self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        saved: LoraSaved<B>,
        dys: &[&B::Tensor],
        needs_dx: bool,
    ) -> Result<Option<B::Tensor>, kiln_nn::Error> {
        let LoraSaved { inner, unscaled } = saved;
        let scaled = match unscaled {
            Some(unscaled) => {
                let dy = if dys.len() == 1 { dys[0].clone() } else { b.concat_columns(dys)? };
                let scale = self.dora_scale(b, layer, w).map_err(model_error)?;
                let dm = b.column_dot(&dy, &unscaled, None)?;
                let dm = b.affine(&dm, &scale.inverse_norm, &scale.zeros)?;
                self.add_magnitudes(b, layer, &dm)?;
                let dy = b.affine(&dy, &scale.factor, &scale.zeros)?;
                Some(if layer.len() == 1 { vec![dy] } else { b.split_columns(&dy, &part_rows(layer))? })
            }
            None => None,
        };
        let dys = scaled.as_ref().map_or_else(|| dys.to_vec(), |dys| dys.iter().collect());
        let parts: Vec<_> = self.parts(layer).collect();
        let inputs = self.dropped(b, &parts, x).map_err(model_error)?;
        let updates = updates(&parts, &inputs);
        let earlier = |(_, _, adapter): &(usize, &str, &LayerAdapter<B>)| {
            let [down, up] = [0, 1].map(|i| adapter.params[i].grad.clone());
            down.zip(up)
        };
        let earlier: Vec<_> = parts.iter().map(earlier).collect();
        let add: Vec<_> = earlier.iter().map(|e| e.as_ref().map(|(down, up)| [down, up])).collect();
        let gradients = b.low_rank_backward(&dys, x, &updates, &inner, &add)?;
        let mut dx = None;
        if needs_dx {
            // The updates first, so that the large product adds them.
            let mut sum: Option<B::Tensor> = None;
            for ((update, gradient), (_, name, _)) in updates.iter().zip(&gradients).zip(&parts) {
                sum = Some(match self.dropout_seed {
                    Some(seed) if update.input.is_some() => {
                        let dropped = b.matmul_nn(&gradient.inner, update.down, 1.0, None)?;
                        let dropped = b.dropout(&dropped, self.dropout, layer_seed(seed, name))?;
                        sum.map_or(Ok(dropped.clone()), |sum| b.add(&sum, &dropped))?
                    }
                    _ => b.matmul_nn(&gradient.inner, update.down, 1.0, sum.as_ref())?,
                });
            }
            dx = Some(b.linear_backward(&dys, w, sum.as_ref())?);
        }
        let names: Vec<String> = parts.iter().map(|(_, name, _)| (*name).to_owned()).collect();
        for (name, gradient) in names.iter().zip(gradients) {
            if let Some(adapter) = self.layers.get_mut(name) {
                adapter.params[0].grad = Some(gradient.down);
                adapter.params[1].grad = Some(gradient.up);
            }
        }
        Ok(dx)
    }

    /// Adds the magnitudes' gradients, given for all outputs of the layer.
    fn add_magnitudes(&mut self, b: &B, layer: &LayerStack, dm: &B::Tensor) -> Result<(), kiln_nn::Error> {
        let mut first = 0;
        for (name, rows) in layer {
            if let Some(adapter) = self.layers.get_mut(name) {
                let part = b.slice_rows(dm, first..first + rows)?;
                let grad = &mut adapter.params[2].grad;
                *grad = Some(match grad.take() {
                    Some(earlier) => b.add(&earlier, &part)?,
                    None => part,
                });
            }
            first += rows;
        }
        Ok(())
    }

    /// DoRA's factors of a layer, with magnitudes that have not been set yet: those of the weight itself.
    fn dora_scale(&self, b: &B, layer: &LayerStack, w: &B::Weight) -> Result<DoraScale<B>> {
        let key = &layer[0].0;
        if let Some(scale) = self.dora.borrow().get(key) {
            return Ok(scale.clone());
        }
        let parts: Vec<_> = self.parts(layer).collect();
        let none: Vec<Option<B::Tensor>> = parts.iter().map(|_| None).collect();
        let norms = b.download(&b.row_norms(w, &updates(&parts, &none))?)?.to_f32()?.into_owned();
        let mut factors = vec![1f32; norms.len()];
        for (first, _, adapter) in &parts {
            let magnitude = b.download(&adapter.params[2].value)?;
            for (i, magnitude) in magnitude.to_f32()?.iter().enumerate() {
                factors[first + i] = magnitude / norms[first + i];
            }
        }
        let upload = |values: Vec<f32>| b.upload(&HostTensor::from_f32([norms.len()], values)?, DType::F32);
        let scale = DoraScale {
            factor: upload(factors)?,
            inverse_norm: upload(norms.iter().map(|n| 1.0 / n).collect())?,
            zeros: upload(vec![0.0; norms.len()])?,
        };
        self.dora.borrow_mut().insert(key.clone(), scale.clone());
        Ok(scale)
    }

    /// Sets DoRA's magnitudes of a layer to the norms of the weight's rows.
    pub(crate) fn initialize_magnitudes(&mut self, b: &B, layer: &LayerStack, w: &B::Weight) -> Result<()> {
        if self.kind != AdapterKind::Dora || !layer.iter().any(|(name, _)| self.layers.contains_key(name)) {
            return Ok(());
        }
        let norms = b.row_norms(w, &[])?;
        let mut first = 0;
        for (name, rows) in layer {
            if let Some(adapter) = self.layers.get_mut(name) {
                debug_assert_eq!(adapter.params[2].value.shape().dims(), [*rows]);
                adapter.params[2].value = b.slice_rows(&norms, first..first + rows)?;
            }
            first += rows;
        }
        self.changed();
        Ok(())
    }
}

/// The rows of each part of a layer.
fn part_rows(layer: &LayerStack) -> Vec<usize> {
    layer.iter().map(|(_, rows)| *rows).collect()
}

/// Converts to the model's error, which the model's traits return.
fn model_error(e: crate::Error) -> kiln_nn::Error {
    match e {
        crate::Error::Model(e) => e,
        crate::Error::Ops(e) => e.into(),
        crate::Error::Tensor(e) => e.into(),
        other => kiln_nn::Error::request(other.to_string()),
    }
}
