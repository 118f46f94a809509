//! The list of the transformer's linear layers, from its configuration alone.

use kiln_weights::{KnownTensors, LayerShape};

#[cfg(doc)]
use super::Transformer;
use super::config::Config;

impl Config {
    /// Lists all linear layers, under the names that [`Transformer::load`] uses.
    pub fn linear_layers(&self) -> Vec<LayerShape> {
        let (dim, mlp) = (self.dim(), self.mlp_dim());
        let mut layers = Vec::new();
        let mut add = |name: String, rows, cols| layers.push(LayerShape { name, rows, cols });
        add("x_embedder".into(), dim, self.in_channels);
        add("context_embedder".into(), dim, self.joint_attention_dim);
        for embedder in ["timestep_embedder", "guidance_embedder"] {
            if embedder == "timestep_embedder" || self.guidance_embeds {
                let name = |leaf: &str| format!("time_guidance_embed.{embedder}.{leaf}");
                add(name("linear_1"), dim, self.timestep_guidance_channels);
                add(name("linear_2"), dim, dim);
            }
        }
        if self.num_layers > 0 {
            add("double_stream_modulation_img.linear".into(), 6 * dim, dim);
            add("double_stream_modulation_txt.linear".into(), 6 * dim, dim);
        }
        add("single_stream_modulation.linear".into(), 3 * dim, dim);
        for block in 0..self.num_layers {
            let name = |leaf: &str| format!("transformer_blocks.{block}.{leaf}");
            let attention = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"];
            for leaf in attention.into_iter().chain(["to_out.0", "to_add_out"]) {
                add(name(&format!("attn.{leaf}")), dim, dim);
            }
            for stream in ["ff", "ff_context"] {
                add(name(&format!("{stream}.linear_in")), 2 * mlp, dim);
                add(name(&format!("{stream}.linear_out")), dim, mlp);
            }
        }
        for block in 0..self.num_single_layers {
            let name = |leaf: &str| format!("single_transformer_blocks.{block}.attn.{leaf}");
            add(name("to_qkv_mlp_proj"), 3 * dim + 2 * mlp, dim);
            add(name("to_out"), dim, dim + mlp);
        }
        add("norm_out.linear".into(), 2 * dim, dim);
        add("proj_out".into(), self.out_channels.unwrap_or(self.in_channels), dim);
        layers
    }

    /// Lists all tensors: those of the linear layers, and the norms of queries and keys.
    pub fn tensors(&self) -> KnownTensors {
        let mut tensors = KnownTensors::default();
        for LayerShape { name, rows, cols } in self.linear_layers() {
            tensors.add_linear(&name, [rows, cols]);
        }
        let norm_shape = [self.attention_head_dim];
        for block in 0..self.num_layers {
            for norm in ["norm_q", "norm_k", "norm_added_q", "norm_added_k"] {
                tensors.add(format!("transformer_blocks.{block}.attn.{norm}.weight"), norm_shape);
            }
        }
        for block in 0..self.num_single_layers {
            for norm in ["norm_q", "norm_k"] {
                tensors.add(format!("single_transformer_blocks.{block}.attn.{norm}.weight"), norm_shape);
            }
        }
        tensors
    }

    /// Number of elements of all linear layers, and of the largest.
    pub fn linear_elements(&self) -> [u64; 2] {
        let layers = self.linear_layers();
        let elements = || layers.iter().map(|layer| layer.rows as u64 * layer.cols as u64);
        [elements().sum(), elements().max().unwrap_or(0)]
    }

    /// Floating-point operations of a forward pass over `rows` tokens: matrix products and attention.
    pub fn operations(&self, rows: usize) -> f64 {
        let (rows, blocks) = (rows as f64, (self.num_layers + self.num_single_layers) as f64);
        let [weights, _] = self.linear_elements();
        2.0 * weights as f64 * rows + 4.0 * rows * rows * self.dim() as f64 * blocks
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kiln_ops::Reference;
    use kiln_tensor::DType;
    use kiln_weights::WeightSource;

    use super::*;
    use crate::ResidencyPlan;
    use crate::transformer::Transformer;

    #[test]
    fn the_list_equals_the_layers_that_are_loaded() {
        for (guidance, doubles) in [(false, 2), (true, 2), (false, 0)] {
            let config: Config = serde_json::from_str(&format!(
                r#"{{"in_channels": 4, "out_channels": 6, "num_layers": {doubles}, "num_single_layers": 3,
                    "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12,
                    "timestep_guidance_channels": 10, "axes_dims_rope": [2, 2, 2, 2],
                    "guidance_embeds": {guidance}}}"#
            ))
            .unwrap();
            let source = WeightSource::synthetic(1 << 20);
            let b = Reference::new();
            let mut model =
                Transformer::load(&b, &source.root(), &config, DType::F32, &ResidencyPlan::all_on_device())
                    .unwrap();
            let loaded = model.linears().into_iter().flat_map(|linear| linear.shapes());
            let loaded: BTreeSet<_> = loaded.map(|layer| (layer.name, layer.rows, layer.cols)).collect();
            let listed = config.linear_layers();
            let names: BTreeSet<_> =
                listed.iter().map(|layer| (layer.name.clone(), layer.rows, layer.cols)).collect();
            assert_eq!(loaded, names);
            assert_eq!(names.len(), listed.len());
        }
    }
}
