//! Which weights stay on a device whose memory is short.

use std::fmt;

use kiln_model::{ResidencyPlan, text_encoder, transformer};
use kiln_weights::LinearForm;

use crate::memory::{Gib, MemoryNeed};

/// What a model's linear layers take on a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightBytes {
    /// The text encoder's layers that are run.
    pub text_encoder: u64,
    /// The transformer's.
    pub transformer: u64,
    /// The largest one of all.
    pub largest: u64,
    /// The largest one that is packed, in full: one at a time is written out for its product.
    pub written_out: u64,
}

impl WeightBytes {
    /// Of models of this size, whose weights are stored in so many bytes each, with the transformer's turned into `form`.
    pub fn new(
        text_encoder: Option<(&text_encoder::Config, f64)>,
        (transformer, stored): (&transformer::Config, f64),
        form: LinearForm,
    ) -> WeightBytes {
        let element = match form {
            LinearForm::Float | LinearForm::StoredFp8 => stored,
            LinearForm::Int8 { .. } | LinearForm::Fp8 => 1.0,
        };
        let of = |[all, largest]: [u64; 2], element: f64, packed: bool| {
            let bytes = |count: u64| (count as f64 * element) as u64;
            [bytes(all), bytes(largest), if packed && element < BF16 { largest * BF16 as u64 } else { 0 }]
        };
        let text = text_encoder.map_or([0; 3], |(config, stored)| of(config.linear_elements(), stored, true));
        let rest = of(transformer.linear_elements(), element, form == LinearForm::Float);
        WeightBytes {
            text_encoder: text[0],
            transformer: rest[0],
            largest: text[1].max(rest[1]),
            written_out: text[2].max(rest[2]),
        }
    }
}

/// Bytes of a number in the type that packed weights are written out in.
const BF16: f64 = 2.0;

/// Which weights stay on a device whose memory is short; the others are brought in as they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// All of them.
    pub weights: WeightBytes,
    /// Bytes of the text encoder that stay.
    pub text_encoder: u64,
    /// Bytes of the transformer that stay.
    pub transformer: u64,
}

impl Placement {
    /// What always stays beside layers and activations: the autoencoder's weights, the products' own memory.
    const FIXED: u64 = 256 << 20;
    /// So many of the largest weight are on the device while some are brought in.
    const IN_TURN: u64 = 3;

    /// The placement for pictures that need `need`, within `limit` bytes; how many would do, where those can't.
    ///
    /// The text encoder goes first: it is used once a picture, the transformer at every step.
    pub fn new(weights: WeightBytes, need: &MemoryNeed, limit: u64) -> Result<Placement, u64> {
        // Blocks are somewhat larger than what was asked for, and some lie idle: so much more was enough on a GPU.
        let WeightBytes { text_encoder, transformer, largest, written_out } = weights;
        let work = need.peak() + need.peak() / 5 * 3 + Placement::FIXED + written_out;
        if work + text_encoder + transformer <= limit {
            return Ok(Placement { weights, text_encoder, transformer });
        }
        let least = work + largest;
        if limit < least {
            return Err(least);
        }
        let room = limit.saturating_sub(work + Placement::IN_TURN * largest);
        Ok(Placement { weights, text_encoder: 0, transformer: transformer.min(room) })
    }

    /// Which of the text encoder's weights stay.
    pub fn text_encoder_plan(&self) -> ResidencyPlan {
        ResidencyPlan::new(self.text_encoder, self.weights.text_encoder)
    }

    /// Which of the transformer's weights stay.
    pub fn transformer_plan(&self) -> ResidencyPlan {
        ResidencyPlan::new(self.transformer, self.weights.transformer)
    }

    /// Whether everything stays.
    pub fn is_whole(&self) -> bool {
        self.text_encoder == self.weights.text_encoder && self.transformer == self.weights.transformer
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WeightBytes { transformer, .. } = self.weights;
        match (self.is_whole(), transformer - self.transformer) {
            (true, _) => f.write_str("the whole model stays on the GPU"),
            (_, 0) => {
                f.write_str("the transformer stays on the GPU; the text encoder is brought in as it is used")
            }
            (_, gone) => write!(
                f,
                "the text encoder and {} of the transformer's {} are brought in as they are used",
                Gib(gone),
                Gib(transformer)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const WEIGHTS: WeightBytes =
        WeightBytes { text_encoder: 6 * GIB, transformer: 7 * GIB, largest: GIB / 6, written_out: 0 };
    const NEED: MemoryNeed = MemoryNeed { transformer: GIB / 2, autoencoder: 5 * GIB / 4 };

    fn place(limit: u64) -> Result<Placement, u64> {
        Placement::new(WEIGHTS, &NEED, limit)
    }

    #[test]
    fn packed_weights_take_what_their_file_does_and_one_of_them_in_full() {
        let config: transformer::Config = serde_json::from_str(
            r#"{"in_channels": 128, "num_layers": 5, "num_single_layers": 20, "attention_head_dim": 128,
                "num_attention_heads": 24, "joint_attention_dim": 7680, "timestep_guidance_channels": 256,
                "mlp_ratio": 3.0, "axes_dims_rope": [32, 32, 32, 32]}"#,
        )
        .unwrap();
        let [all, largest] = config.linear_elements();
        let of = |stored, form| WeightBytes::new(None, (&config, stored), form);
        let four = of(0.5625, LinearForm::Float);
        assert_eq!((four.transformer, four.written_out), ((all as f64 * 0.5625) as u64, 2 * largest));
        assert_eq!(of(2.0, LinearForm::Float).written_out, 0);
        let eight = of(1.0, LinearForm::StoredFp8);
        assert_eq!((eight.transformer, eight.written_out), (all, 0));
        assert_eq!(of(2.0, LinearForm::Fp8), eight);
    }

    #[test]
    fn with_room_enough_everything_stays() {
        assert!(place(16 * GIB).unwrap().is_whole());
    }

    #[test]
    fn the_text_encoder_goes_before_any_of_the_transformer() {
        let placement = place(10 * GIB).unwrap();
        assert_eq!((placement.text_encoder, placement.transformer), (0, 7 * GIB));
        assert!(placement.to_string().starts_with("the transformer stays"), "{placement}");
    }

    #[test]
    fn what_stays_of_the_transformer_leaves_room_for_work_and_what_comes() {
        let placement = place(6 * GIB).unwrap();
        assert!(placement.transformer > 2 * GIB && placement.transformer < 4 * GIB, "{placement:?}");
        assert!(placement.to_string().contains("of the transformer's 7.0 GiB"), "{placement}");
    }

    #[test]
    fn a_limit_below_the_work_says_what_would_do() {
        let least = place(2 * GIB).unwrap_err();
        assert!(place(least - 1).is_err());
        assert_eq!(place(least).unwrap().transformer, 0);
    }
}
