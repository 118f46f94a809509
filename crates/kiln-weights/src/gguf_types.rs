//! The tensor types of GGUF files.

use kiln_tensor::DType;
use kiln_tensor::packed::Format;

/// A supported tensor type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum GgufType {
    Dense(DType),
    Blocks(Format),
}

use GgufType::{Blocks, Dense};

/// All tensor types: id, name, and what it is or, if Kiln can't read it, the nearest types that it can.
pub(crate) const TYPES: [(u32, &str, Result<GgufType, &str>); 43] = [
    (0, "F32", Ok(Dense(DType::F32))),
    (1, "F16", Ok(Dense(DType::F16))),
    (2, "Q4_0", Ok(Blocks(Format::Q4_0))),
    (3, "Q4_1", Ok(Blocks(Format::Q4_1))),
    (4, "Q4_2", Err("Q4_0 or Q4_K")),
    (5, "Q4_3", Err("Q4_1 or Q4_K")),
    (6, "Q5_0", Ok(Blocks(Format::Q5_0))),
    (7, "Q5_1", Ok(Blocks(Format::Q5_1))),
    (8, "Q8_0", Ok(Blocks(Format::Q8_0))),
    (9, "Q8_1", Err("Q8_0")),
    (10, "Q2_K", Ok(Blocks(Format::Q2K))),
    (11, "Q3_K", Ok(Blocks(Format::Q3K))),
    (12, "Q4_K", Ok(Blocks(Format::Q4K))),
    (13, "Q5_K", Ok(Blocks(Format::Q5K))),
    (14, "Q6_K", Ok(Blocks(Format::Q6K))),
    (15, "Q8_K", Err("Q8_0")),
    (16, "IQ2_XXS", Err("Q2_K")),
    (17, "IQ2_XS", Err("Q2_K")),
    (18, "IQ3_XXS", Err("Q3_K or IQ4_XS")),
    (19, "IQ1_S", Err("Q2_K")),
    (20, "IQ4_NL", Ok(Blocks(Format::Iq4Nl))),
    (21, "IQ3_S", Err("Q3_K or IQ4_XS")),
    (22, "IQ2_S", Err("Q2_K")),
    (23, "IQ4_XS", Ok(Blocks(Format::Iq4Xs))),
    (24, "I8", Ok(Dense(DType::I8))),
    (25, "I16", Err("F16")),
    (26, "I32", Ok(Dense(DType::I32))),
    (27, "I64", Ok(Dense(DType::I64))),
    (28, "F64", Ok(Dense(DType::F64))),
    (29, "IQ1_M", Err("Q2_K")),
    (30, "BF16", Ok(Dense(DType::BF16))),
    // Orders of the values for some processors, which llama.cpp no longer writes.
    (31, "Q4_0_4_4", Err("Q4_0")),
    (32, "Q4_0_4_8", Err("Q4_0")),
    (33, "Q4_0_8_8", Err("Q4_0")),
    (34, "TQ1_0", Err("Q2_K")),
    (35, "TQ2_0", Err("Q2_K")),
    (36, "IQ4_NL_4_4", Err("IQ4_NL")),
    (37, "IQ4_NL_4_8", Err("IQ4_NL")),
    (38, "IQ4_NL_8_8", Err("IQ4_NL")),
    (39, "MXFP4", Err("Q4_K or IQ4_XS")),
    (40, "NVFP4", Err("Q4_K or IQ4_XS, or an nvfp4 safetensors")),
    (41, "Q1_0", Err("Q2_K")),
    (42, "Q2_0", Err("Q2_K")),
];

/// The id of a type; `None` if GGUF doesn't have it.
pub(crate) fn type_id(wanted: GgufType) -> Option<u32> {
    TYPES.iter().find(|t| t.2 == Ok(wanted)).map(|t| t.0)
}

/// The names of all supported types, for messages.
pub(crate) fn supported_types() -> String {
    TYPES.iter().filter(|t| t.2.is_ok()).map(|t| t.1).collect::<Vec<_>>().join(", ")
}
