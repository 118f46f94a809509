//! The types that weights are quantized to.

use kiln_tensor::packed::Format;
use kiln_weights::export::{Preset, Storage};

/// A type that weights can be quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum QuantType {
    /// 8-bit integers, one scale per row
    Int8,
    /// 8-bit floats (e4m3), one scale per layer
    Fp8,
    /// 4-bit floats, one scale per 16 weights
    Nvfp4,
    /// GGUF, 8.5 bits per weight
    #[cfg_attr(feature = "cli", value(name = "q8_0"))]
    Q8_0,
    /// GGUF, 6.6 bits
    #[cfg_attr(feature = "cli", value(name = "q6_k"))]
    Q6K,
    /// GGUF, q5_k with q6_k where it matters most
    #[cfg_attr(feature = "cli", value(name = "q5_k_m"))]
    Q5KM,
    /// GGUF, q5_k under llama.cpp's name
    #[cfg_attr(feature = "cli", value(name = "q5_k_s"))]
    Q5KS,
    /// GGUF, 5.5 bits
    #[cfg_attr(feature = "cli", value(name = "q5_k"))]
    Q5K,
    /// GGUF, q4_k with q5_k and q6_k where it matters most
    #[cfg_attr(feature = "cli", value(name = "q4_k_m"))]
    Q4KM,
    /// GGUF, q4_k with some q5_k
    #[cfg_attr(feature = "cli", value(name = "q4_k_s"))]
    Q4KS,
    /// GGUF, 4.5 bits
    #[cfg_attr(feature = "cli", value(name = "q4_k"))]
    Q4K,
    /// GGUF, q3_k with much q5_k and q4_k
    #[cfg_attr(feature = "cli", value(name = "q3_k_l"))]
    Q3KL,
    /// GGUF, q3_k with some q4_k and q5_k
    #[cfg_attr(feature = "cli", value(name = "q3_k_m"))]
    Q3KM,
    /// GGUF, q3_k under llama.cpp's name
    #[cfg_attr(feature = "cli", value(name = "q3_k_s"))]
    Q3KS,
    /// GGUF, 3.4 bits
    #[cfg_attr(feature = "cli", value(name = "q3_k"))]
    Q3K,
    /// GGUF, 2.6 bits
    #[cfg_attr(feature = "cli", value(name = "q2_k"))]
    Q2K,
    /// GGUF, 6 bits
    #[cfg_attr(feature = "cli", value(name = "q5_1"))]
    Q5_1,
    /// GGUF, 5.5 bits
    #[cfg_attr(feature = "cli", value(name = "q5_0"))]
    Q5_0,
    /// GGUF, 5 bits
    #[cfg_attr(feature = "cli", value(name = "q4_1"))]
    Q4_1,
    /// GGUF, 4.5 bits
    #[cfg_attr(feature = "cli", value(name = "q4_0"))]
    Q4_0,
}

impl QuantType {
    /// Returns how the weights are stored; `None` for int8, which is a form to compute in, not a packed format.
    pub fn storage(self) -> Option<Storage> {
        let format = match self {
            QuantType::Int8 => return None,
            QuantType::Fp8 => Format::F8E4M3,
            QuantType::Nvfp4 => Format::NvFp4,
            QuantType::Q8_0 => Format::Q8_0,
            QuantType::Q6K => Format::Q6K,
            QuantType::Q5K => Format::Q5K,
            QuantType::Q4K => Format::Q4K,
            QuantType::Q3K => Format::Q3K,
            QuantType::Q2K => Format::Q2K,
            QuantType::Q5_1 => Format::Q5_1,
            QuantType::Q5_0 => Format::Q5_0,
            QuantType::Q4_1 => Format::Q4_1,
            QuantType::Q4_0 => Format::Q4_0,
            QuantType::Q5KM => return Some(Storage::Preset(Preset::Q5KM)),
            QuantType::Q5KS => return Some(Storage::Preset(Preset::Q5KS)),
            QuantType::Q4KM => return Some(Storage::Preset(Preset::Q4KM)),
            QuantType::Q4KS => return Some(Storage::Preset(Preset::Q4KS)),
            QuantType::Q3KL => return Some(Storage::Preset(Preset::Q3KL)),
            QuantType::Q3KM => return Some(Storage::Preset(Preset::Q3KM)),
            QuantType::Q3KS => return Some(Storage::Preset(Preset::Q3KS)),
        };
        Some(Storage::Quantized(format))
    }

    /// Returns whether only GGUF files can hold the type.
    pub fn is_gguf(self) -> bool {
        !matches!(self, QuantType::Int8 | QuantType::Fp8 | QuantType::Nvfp4)
    }

    /// Every type.
    pub const ALL: [QuantType; 20] = [
        QuantType::Int8,
        QuantType::Fp8,
        QuantType::Nvfp4,
        QuantType::Q8_0,
        QuantType::Q6K,
        QuantType::Q5KM,
        QuantType::Q5KS,
        QuantType::Q5K,
        QuantType::Q4KM,
        QuantType::Q4KS,
        QuantType::Q4K,
        QuantType::Q3KL,
        QuantType::Q3KM,
        QuantType::Q3KS,
        QuantType::Q3K,
        QuantType::Q2K,
        QuantType::Q5_1,
        QuantType::Q5_0,
        QuantType::Q4_1,
        QuantType::Q4_0,
    ];

    /// Returns the type of this name, in any case.
    pub fn from_name(name: &str) -> Option<QuantType> {
        QuantType::ALL.into_iter().find(|kind| kind.name().eq_ignore_ascii_case(name))
    }

    /// Returns the name of the type on the command line.
    pub fn name(self) -> &'static str {
        match self.storage() {
            None => "int8",
            Some(Storage::Quantized(Format::F8E4M3)) => "fp8",
            Some(Storage::Quantized(format)) => format.name(),
            Some(Storage::Preset(preset)) => preset.name(),
            Some(Storage::Keep | Storage::Dense(_)) => "",
        }
    }
}
