use kiln_tensor::DType;
use safetensors::Dtype;

/// The dtypes that Kiln reads, as safetensors headers name them.
const DTYPES: [(&str, Dtype, DType); 11] = [
    ("F64", Dtype::F64, DType::F64),
    ("F32", Dtype::F32, DType::F32),
    ("F16", Dtype::F16, DType::F16),
    ("BF16", Dtype::BF16, DType::BF16),
    ("F8_E4M3", Dtype::F8_E4M3, DType::F8E4M3),
    ("F8_E5M2", Dtype::F8_E5M2, DType::F8E5M2),
    ("I64", Dtype::I64, DType::I64),
    ("I32", Dtype::I32, DType::I32),
    ("I8", Dtype::I8, DType::I8),
    ("U8", Dtype::U8, DType::U8),
    ("BOOL", Dtype::BOOL, DType::Bool),
];

/// The dtype of this name in a header.
pub(crate) fn from_name(name: &str) -> Option<(Dtype, DType)> {
    DTYPES.iter().find(|d| d.0 == name).map(|d| (d.1, d.2))
}

/// The name of `dtype` in a header.
pub(crate) fn name_of(dtype: DType) -> &'static str {
    // Every DType is in the table, as a test checks.
    DTYPES.iter().find(|d| d.2 == dtype).map_or("", |d| d.0)
}

/// All names, for messages.
pub(crate) fn names() -> String {
    DTYPES.map(|d| d.0).join(", ")
}

/// What a dtype that Kiln doesn't read stands for, for messages; empty if its name says it.
pub(crate) fn meaning(name: &str) -> &'static str {
    match name {
        "U32" => ", which MLX's quantized weights have",
        "F8_E8M0" => ", which the scales of mxfp8 and mxfp4 have",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_has_a_name_of_its_size() {
        use DType::*;
        for dtype in [F32, BF16, F16, F64, F8E4M3, F8E5M2, U8, I8, I32, I64, Bool] {
            let (file, back) = from_name(name_of(dtype)).unwrap();
            assert_eq!(back, dtype);
            assert_eq!(file.bitsize(), dtype.size() * 8);
            assert_eq!(file.to_string(), name_of(dtype));
        }
    }
}
