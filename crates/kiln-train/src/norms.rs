//! How much a trained adapter changes the model: the Frobenius norm of its update by group of layers.

use std::collections::BTreeMap;
use std::fmt;

use kiln_weights::TrainedModule;

use crate::Result;

/// Updates below this norm change no image.
const NOTHING: f64 = 1e-6;

/// The norms of an adapter's updates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateNorms {
    /// Norm of each group, over all of its layers.
    pub groups: BTreeMap<&'static str, f64>,
}

impl UpdateNorms {
    /// Measures an adapter.
    pub fn new(modules: &[TrainedModule]) -> Result<UpdateNorms> {
        let mut squares: BTreeMap<&'static str, f64> = BTreeMap::new();
        for module in modules {
            *squares.entry(group(&module.layer)).or_default() += squared_norm(module)?;
        }
        let groups = squares.into_iter().map(|(name, square)| (name, square.sqrt())).collect();
        Ok(UpdateNorms { groups })
    }

    /// Whether the adapter changes nothing.
    pub fn is_zero(&self) -> bool {
        self.groups.values().all(|norm| *norm < NOTHING)
    }
}

impl fmt::Display for UpdateNorms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.groups.iter().map(|(name, norm)| format!("{name} {norm:.3}"));
        f.write_str(&groups.collect::<Vec<_>>().join(", "))
    }
}

fn group(layer: &str) -> &'static str {
    let is_single = layer.starts_with("single_transformer_blocks.");
    let is_double = layer.starts_with("transformer_blocks.");
    match () {
        () if is_single && layer.ends_with("to_out") => "single blocks out",
        () if is_single => "single blocks in",
        () if is_double && layer.contains(".attn.") => "double blocks attention",
        () if is_double => "double blocks MLP",
        () => "other layers",
    }
}

/// The squared norm of a module's update.
///
/// Of `B · A` it is the sum of the elementwise product of `Bᵀ · B` and `A · Aᵀ`, which are as small as the rank; of a
/// Kronecker product, the product of those of its factors. A DoRA is measured by its matrices alone.
fn squared_norm(module: &TrainedModule) -> Result<f64> {
    let scale = f64::from(module.alpha) / module.rank.max(1) as f64;
    let matrix = |name: &str| -> Result<Option<(Vec<f32>, [usize; 2])>> {
        let Some(tensor) = module.tensors.get(name) else { return Ok(None) };
        let dims = tensor.shape().dims();
        let rows = dims.first().copied().unwrap_or(1);
        Ok(Some((tensor.to_f32()?.into_owned(), [rows, tensor.numel() / rows.max(1)])))
    };
    let full = |values: &[f32]| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
    let product = |down: &str, up: &str| -> Result<Option<f64>> {
        Ok(matrix(down)?.zip(matrix(up)?).map(|((down, [rank, cols]), (up, [rows, _]))| {
            let gram = |i: usize, j: usize, values: &[f32], [count, step, stride]: [usize; 3]| {
                let dot = |k: usize| {
                    f64::from(values[i * step + k * stride]) * f64::from(values[j * step + k * stride])
                };
                (0..count).map(dot).sum::<f64>()
            };
            let term =
                |i: usize, j: usize| gram(i, j, &down, [cols, cols, 1]) * gram(i, j, &up, [rows, 1, rank]);
            (0..rank).flat_map(|i| (0..rank).map(move |j| (i, j))).map(|(i, j)| term(i, j)).sum()
        }))
    };
    if let Some(square) = product("lora_A.weight", "lora_B.weight")? {
        return Ok(square * scale * scale);
    }
    let factor = |number: usize| -> Result<f64> {
        let names = [format!("lokr_w{number}"), format!("lokr_w{number}_b"), format!("lokr_w{number}_a")];
        Ok(match matrix(&names[0])? {
            Some((values, _)) => full(&values),
            None => product(&names[1], &names[2])?.unwrap_or(0.0),
        })
    };
    // Two full factors have no rank to scale by.
    let is_scaled = module.tensors.keys().any(|name| name.ends_with("_a"));
    Ok(factor(1)? * factor(2)? * if is_scaled { scale * scale } else { 1.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_tensor::HostTensor;

    fn module(layer: &str, tensors: Vec<(&str, [usize; 2], Vec<f32>)>) -> TrainedModule {
        let tensors = tensors
            .into_iter()
            .map(|(name, shape, values)| (name.to_owned(), HostTensor::from_f32(shape, values).unwrap()));
        TrainedModule { layer: layer.into(), rank: 2, alpha: 4.0, tensors: tensors.collect() }
    }

    #[test]
    fn the_norm_is_that_of_the_product() {
        let (down, up) = (vec![1.0, 2.0, 3.0, -1.0, 0.5, 0.0], vec![1.0, -1.0, 0.5, 2.0]);
        let mut square = 0.0;
        for row in 0..2 {
            for col in 0..3 {
                let value = up[row * 2] * down[col] + up[row * 2 + 1] * down[3 + col];
                square += f64::from(2.0 * value * 2.0 * value);
            }
        }
        let lora = [("lora_A.weight", [2, 3], down.clone()), ("lora_B.weight", [2, 2], up.clone())];
        let zero = [("lora_A.weight", [2, 3], down.clone()), ("lora_B.weight", [2, 2], vec![0.0; 4])];
        let lokr =
            [("lokr_w1", [1, 2], vec![3.0, 4.0]), ("lokr_w2_a", [2, 2], up), ("lokr_w2_b", [2, 3], down)];
        let modules = [
            module("transformer_blocks.0.attn.to_q", lora.into()),
            module("transformer_blocks.0.ff.linear_in", zero.clone().into()),
            module("single_transformer_blocks.0.attn.to_out", lokr.into()),
        ];
        let norms = UpdateNorms::new(&modules).unwrap();
        let close =
            |name: &str, expected: f64| assert!((norms.groups[name] - expected).abs() < 1e-9, "{norms}");
        close("double blocks attention", square.sqrt());
        close("double blocks MLP", 0.0);
        close("single blocks out", 5.0 * square.sqrt());
        assert!(!norms.is_zero());
        assert!(UpdateNorms::new(&modules[1..2]).unwrap().is_zero());
    }
}
