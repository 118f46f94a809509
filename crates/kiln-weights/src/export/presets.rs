//! Presets that mix GGUF formats: sensitive tensors get more bits than the rest.
//!
//! For a text encoder these are llama.cpp's rules (of a dense model without an importance matrix), so that a file has
//! the types and the size that its name promises:
//!
//! | | attention value | attention output | MLP down | other layers |
//! |---|---|---|---|---|
//! | `q3_k_s` | q3_k | q3_k | q3_k | q3_k |
//! | `q3_k_m` | q4_k; q5_k in the first 2 layers | q4_k | q4_k; q5_k in the first 16th | q3_k |
//! | `q3_k_l` | q5_k | q5_k | q5_k | q3_k |
//! | `q4_k_s` | q4_k; q5_k in the first 4 layers | q4_k | q4_k; q5_k in the first 8th | q4_k |
//! | `q4_k_m` | q4_k; q6_k in half of the layers | q4_k | as attention value | q4_k |
//! | `q5_k_s` | q5_k | q5_k | q5_k | q5_k |
//! | `q5_k_m` | q5_k; q6_k in half of the layers | q5_k | as attention value | q5_k |
//! | `q6_k` | q6_k | q6_k | q6_k | q6_k |
//!
//! Half of the layers are the first and the last 8th, and every third between them. The output layer is q6_k, and so
//! is an embedding that serves as output layer; any other embedding has the type of the other layers.
//!
//! llama.cpp has no rules for image models. Those of ComfyUI-GGUF, with which the published FLUX files are made,
//! raise q, k and v of the double blocks to q4_k in `q3_k_m` and `q3_k_l`, to q5_k in `q4_k_m` and to q6_k in
//! `q5_k_m`. All other layers of the blocks have the preset's own type.
//!
//! llama.cpp's `Q2_K_S` is left out: it needs an importance matrix.

use kiln_family::Family;
use kiln_tensor::packed::Format;

use crate::layout::parse_index;
use crate::{Component, WeightSource};

/// A mix of formats under llama.cpp's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the table above describes them")]
pub enum Preset {
    Q3KS,
    Q3KM,
    Q3KL,
    Q4KS,
    Q4KM,
    Q5KS,
    Q5KM,
    Q6K,
}

/// Preset, name, the format of most tensors, and the number that llama.cpp writes as `general.file_type`.
const TABLE: [(Preset, &str, Format, u32); 8] = [
    (Preset::Q3KS, "q3_k_s", Format::Q3K, 11),
    (Preset::Q3KM, "q3_k_m", Format::Q3K, 12),
    (Preset::Q3KL, "q3_k_l", Format::Q3K, 13),
    (Preset::Q4KS, "q4_k_s", Format::Q4K, 14),
    (Preset::Q4KM, "q4_k_m", Format::Q4K, 15),
    (Preset::Q5KS, "q5_k_s", Format::Q5K, 16),
    (Preset::Q5KM, "q5_k_m", Format::Q5K, 17),
    (Preset::Q6K, "q6_k", Format::Q6K, 18),
];

/// What the rules need to know about a text encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextEncoderInfo {
    /// The number of layers.
    pub layers: usize,
    /// Whether the embedding serves as output layer, too.
    pub tied_embedding: bool,
}

impl TextEncoderInfo {
    /// Counts the layers of a text encoder, from [`WeightSource::component`]. Any other component has none.
    pub fn of(source: &WeightSource) -> TextEncoderInfo {
        let layers = source.names().filter_map(|name| Some(layer(name)?.0 + 1)).max();
        TextEncoderInfo {
            layers: layers.unwrap_or(0),
            tied_embedding: !source.contains(&format!("{OUTPUT}.weight")),
        }
    }
}

const EMBEDDING: &str = "model.embed_tokens";
const OUTPUT: &str = "lm_head";

impl Preset {
    /// Every preset, from the smallest to the largest.
    pub fn all() -> impl Iterator<Item = Preset> {
        TABLE.iter().map(|row| row.0)
    }

    /// The preset of this name, in upper or lower case.
    pub fn parse(name: &str) -> Option<Preset> {
        TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    fn info(self) -> (&'static str, Format, u32) {
        let (_, name, base, file_type) = TABLE[self as usize];
        (name, base, file_type)
    }

    /// The name in lower case, as on the command line.
    pub fn name(self) -> &'static str {
        self.info().0
    }

    /// The format of most tensors.
    pub fn base(self) -> Format {
        self.info().1
    }

    /// The value of the GGUF key `general.file_type`.
    pub fn file_type(self) -> u32 {
        self.info().2
    }

    /// The format of a quantized tensor, under the model's own name for it.
    ///
    /// Whether a tensor is quantized at all, and what replaces a format whose blocks don't fit its rows, is not
    /// decided here.
    pub fn format(
        self,
        component: Component,
        family: &Family,
        name: &str,
        text_encoder: TextEncoderInfo,
    ) -> Format {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        match component {
            Component::TextEncoder => self.text_encoder_format(module, text_encoder),
            Component::Transformer if family.transformer.is_sensitive(module) => self.sensitive_format(),
            Component::Transformer | Component::Vae => self.base(),
        }
    }

    fn text_encoder_format(self, module: &str, info: TextEncoderInfo) -> Format {
        match (module, layer(module)) {
            (OUTPUT, _) => Format::Q6K,
            (EMBEDDING, _) if info.tied_embedding => Format::Q6K,
            (_, Some((i, "self_attn.v_proj"))) => self.value_format(i, info.layers),
            (_, Some((_, "self_attn.o_proj"))) => self.attention_output_format(),
            (_, Some((i, "mlp.down_proj"))) => self.down_format(i, info.layers),
            _ => self.base(),
        }
    }

    fn value_format(self, layer: usize, layers: usize) -> Format {
        match self {
            Preset::Q3KM if layer < 2 => Format::Q5K,
            Preset::Q3KM => Format::Q4K,
            Preset::Q3KL => Format::Q5K,
            Preset::Q4KS if layer < 4 => Format::Q5K,
            Preset::Q4KM | Preset::Q5KM if has_more_bits(layer, layers) => Format::Q6K,
            _ => self.base(),
        }
    }

    fn attention_output_format(self) -> Format {
        match self {
            Preset::Q3KM => Format::Q4K,
            Preset::Q3KL => Format::Q5K,
            _ => self.base(),
        }
    }

    fn down_format(self, layer: usize, layers: usize) -> Format {
        match self {
            Preset::Q3KM if layer < layers / 16 => Format::Q5K,
            Preset::Q3KM => Format::Q4K,
            Preset::Q3KL => Format::Q5K,
            Preset::Q4KS if layer < layers / 8 => Format::Q5K,
            Preset::Q4KM | Preset::Q5KM if has_more_bits(layer, layers) => Format::Q6K,
            _ => self.base(),
        }
    }

    fn sensitive_format(self) -> Format {
        match self {
            Preset::Q3KM | Preset::Q3KL => Format::Q4K,
            Preset::Q4KM => Format::Q5K,
            Preset::Q5KM => Format::Q6K,
            _ => self.base(),
        }
    }
}

/// The number that llama.cpp writes as `general.file_type` for files of one format; `None` if it has none.
pub fn file_type(format: Format) -> Option<u32> {
    match format {
        Format::F32 => Some(0),
        Format::F16 => Some(1),
        Format::BF16 => Some(32),
        Format::Q4_0 => Some(2),
        Format::Q4_1 => Some(3),
        Format::Q5_0 => Some(8),
        Format::Q5_1 => Some(9),
        Format::Q8_0 => Some(7),
        Format::Q2K => Some(10),
        Format::Q3K => Some(Preset::Q3KS.file_type()),
        Format::Q4K => Some(Preset::Q4KS.file_type()),
        Format::Q5K => Some(Preset::Q5KS.file_type()),
        Format::Q6K => Some(Preset::Q6K.file_type()),
        Format::Iq4Nl => Some(25),
        Format::Iq4Xs => Some(30),
        Format::F8E4M3 | Format::F8E5M2 | Format::NvFp4 | Format::I8 => None,
    }
}

/// The number of a text encoder's layer, and the rest of the name.
fn layer(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((parse_index(number)?, rest))
}

/// Whether a layer is one of the more sensitive half.
fn has_more_bits(layer: usize, layers: usize) -> bool {
    let first = layers / 8;
    layer < first || layer >= 7 * layers / 8 || (layer - first) % 3 == 2
}

#[cfg(test)]
mod tests {
    use kiln_family::flux2::FLUX2;

    use super::*;

    const QWEN3_4B: TextEncoderInfo = TextEncoderInfo { layers: 36, tied_embedding: true };
    const QWEN3_8B: TextEncoderInfo = TextEncoderInfo { layers: 36, tied_embedding: false };

    fn of_text_encoder(preset: Preset, name: &str, info: TextEncoderInfo) -> Format {
        preset.format(Component::TextEncoder, &FLUX2, &format!("{name}.weight"), info)
    }

    /// The layers in which `leaf` has another format than the preset's own, with that format.
    fn exceptions(preset: Preset, leaf: &str) -> Vec<(usize, Format)> {
        let format = |i: usize| of_text_encoder(preset, &format!("model.layers.{i}.{leaf}"), QWEN3_4B);
        (0..36).map(|i| (i, format(i))).filter(|(_, format)| *format != preset.base()).collect()
    }

    fn layers(layers: impl IntoIterator<Item = usize>, format: Format) -> Vec<(usize, Format)> {
        layers.into_iter().map(|i| (i, format)).collect()
    }

    #[test]
    fn names_are_those_of_llama_cpp_in_any_case() {
        for (i, preset) in Preset::all().enumerate() {
            assert_eq!(preset as usize, i);
            assert_eq!(Preset::parse(preset.name()), Some(preset));
            assert_eq!(Preset::parse(&preset.name().to_uppercase()), Some(preset));
        }
        assert_eq!(Preset::parse("Q4_K_M"), Some(Preset::Q4KM));
        for wrong in ["q4_k", "q4_k_l", "q2_k_s", "q8_0", ""] {
            assert_eq!(Preset::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn file_types_are_those_of_llama_cpp() {
        let numbers: Vec<u32> = Preset::all().map(Preset::file_type).collect();
        assert_eq!(numbers, [11, 12, 13, 14, 15, 16, 17, 18]);
        let one = [Format::Q4_0, Format::Q8_0, Format::Q2K, Format::Q4K, Format::BF16, Format::NvFp4];
        assert_eq!(one.map(file_type), [Some(2), Some(7), Some(10), Some(14), Some(32), None]);
    }

    #[test]
    fn layers_of_qwen3_have_the_types_that_llama_cpp_gives_them() {
        let (value, output, down) = ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj");
        // The types of a published Qwen3 4B in Q4_K_M.
        let more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35];
        for preset in [Preset::Q4KM, Preset::Q5KM] {
            assert_eq!(exceptions(preset, value), layers(more, Format::Q6K));
            assert_eq!(exceptions(preset, down), layers(more, Format::Q6K));
            assert_eq!(exceptions(preset, output), []);
        }
        assert_eq!(exceptions(Preset::Q4KS, value), layers(0..4, Format::Q5K));
        assert_eq!(exceptions(Preset::Q4KS, down), layers(0..4, Format::Q5K));
        assert_eq!(exceptions(Preset::Q4KS, output), []);
        let first_two = [layers(0..2, Format::Q5K), layers(2..36, Format::Q4K)].concat();
        assert_eq!(exceptions(Preset::Q3KM, value), first_two);
        assert_eq!(exceptions(Preset::Q3KM, down), first_two);
        assert_eq!(exceptions(Preset::Q3KM, output), layers(0..36, Format::Q4K));
        for leaf in [value, output, down] {
            assert_eq!(exceptions(Preset::Q3KL, leaf), layers(0..36, Format::Q5K));
            for preset in [Preset::Q3KS, Preset::Q5KS, Preset::Q6K] {
                assert_eq!(exceptions(preset, leaf), []);
            }
        }
        for leaf in ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"] {
            for preset in Preset::all() {
                assert_eq!(exceptions(preset, leaf), [], "{} {leaf}", preset.name());
            }
        }
    }

    #[test]
    fn the_number_of_layers_matters() {
        // Mistral Small has 40 layers: 5 at each end.
        let mistral = TextEncoderInfo { layers: 40, tied_embedding: false };
        let format =
            |i: usize| of_text_encoder(Preset::Q4KM, &format!("model.layers.{i}.mlp.down_proj"), mistral);
        let more: Vec<usize> = (0..40).filter(|i| format(*i) == Format::Q6K).collect();
        assert_eq!(more, [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39]);
    }

    #[test]
    fn an_embedding_that_is_the_output_layer_is_q6_k() {
        for preset in Preset::all() {
            assert_eq!(of_text_encoder(preset, EMBEDDING, QWEN3_4B), Format::Q6K);
            assert_eq!(of_text_encoder(preset, EMBEDDING, QWEN3_8B), preset.base());
            assert_eq!(of_text_encoder(preset, OUTPUT, QWEN3_8B), Format::Q6K);
        }
    }

    #[test]
    fn image_models_have_more_bits_in_q_k_and_v_of_double_blocks() {
        let raised = [
            (Preset::Q3KS, Format::Q3K),
            (Preset::Q3KM, Format::Q4K),
            (Preset::Q3KL, Format::Q4K),
            (Preset::Q4KS, Format::Q4K),
            (Preset::Q4KM, Format::Q5K),
            (Preset::Q5KS, Format::Q5K),
            (Preset::Q5KM, Format::Q6K),
            (Preset::Q6K, Format::Q6K),
        ];
        let none = TextEncoderInfo { layers: 0, tied_embedding: true };
        for (preset, qkv) in raised {
            let format = |name: &str| preset.format(Component::Transformer, &FLUX2, name, none);
            for leaf in ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"] {
                assert_eq!(format(&format!("transformer_blocks.7.attn.{leaf}.weight")), qkv, "{leaf}");
            }
            for other in [
                "transformer_blocks.0.attn.to_out.0.weight",
                "transformer_blocks.0.attn.to_add_out.weight",
                "transformer_blocks.0.ff.linear_out.weight",
                "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
                "single_transformer_blocks.0.attn.to_out.weight",
            ] {
                assert_eq!(format(other), preset.base(), "{other}");
            }
        }
    }
}
