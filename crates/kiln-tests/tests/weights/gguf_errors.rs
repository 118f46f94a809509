//! The errors of GGUF's formats, compared with those of ggml's own quantizers; and values that are hard to encode.

use std::f64::consts::PI;

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::export::{Container, Options, Storage, TensorNames, export};
use kiln_weights::{Component, Error, Result, WeightSource, save};

const LAYER: &str = "single_transformer_blocks.0.attn.to_out.weight";

/// The sums of ggml's squared errors for normal, laplacian and trained weights (by `tools/formats/ggml_errors.py`).
const GGML: [(Format, [f64; 3]); 10] = [
    (Format::Q4_0, [3.901586437e-01, 1.192869003e+00, 8.345187312e+02]),
    (Format::Q4_1, [3.228645781e-01, 8.741916765e-01, 6.684280388e+02]),
    (Format::Q5_0, [9.587487751e-02, 2.988639758e-01, 2.061146246e+02]),
    (Format::Q5_1, [7.582779535e-02, 2.058241002e-01, 1.570649471e+02]),
    (Format::Q8_0, [1.504429601e-03, 4.692877916e-03, 3.007300223e+00]),
    (Format::Q2K, [4.640795686e+00, 1.242342593e+01, 9.580057591e+03]),
    (Format::Q3K, [1.205706217e+00, 3.232811316e+00, 2.501815958e+03]),
    (Format::Q4K, [2.684977274e-01, 7.437391122e-01, 5.599135741e+02]),
    (Format::Q5K, [6.947056937e-02, 1.908746126e-01, 1.435264121e+02]),
    (Format::Q6K, [1.667927439e-02, 4.881516124e-02, 3.496017129e+01]),
];

const WRITTEN: [Format; 12] = [
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q2K,
    Format::Q3K,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::F8E4M3,
    Format::NvFp4,
];

/// Quantizes a matrix to a file, and returns the values of the file.
fn quantize(format: Format, [rows, cols]: [usize; 2], values: &[f32]) -> Result<Vec<f32>> {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("a.safetensors"), dir.path().join("b"));
    let matrix = HostTensor::from_f32([rows, cols], values.to_vec()).unwrap();
    save::save(&from, &[(LAYER, matrix)], &Default::default())?;
    let container = match format {
        Format::F8E4M3 | Format::NvFp4 => Container::Safetensors,
        _ => Container::Gguf,
    };
    let options = Options {
        component: Component::Transformer,
        container,
        names: TensorNames::Diffusers,
        storage: Storage::Quantized(format),
        threads: 2,
    };
    let result = export(&WeightSource::open(&from)?, &to, &options, &mut |_, _| Ok(()));
    assert_eq!(to.exists(), result.is_ok(), "{format}: a file is left behind");
    result?;
    let written = WeightSource::open(&to)?;
    assert_eq!(written.packed_format(LAYER), Some(format));
    Ok(written.tensor(LAYER)?.to_f32().unwrap().into_owned())
}

/// Numbers between 0 and 1, without both.
fn uniform(state: &mut u32) -> f64 {
    *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    (f64::from(*state >> 8) + 0.5) / f64::from(1 << 24)
}

fn normal(state: &mut u32) -> f64 {
    let radius = (-2.0 * uniform(state).ln()).sqrt();
    radius * (2.0 * PI * uniform(state)).cos()
}

fn laplacian(state: &mut u32) -> f64 {
    let x = uniform(state) - 0.5;
    -(1.0 - 2.0 * x.abs()).ln() * x.signum()
}

fn draw([rows, cols]: [usize; 2], distribution: fn(&mut u32) -> f64) -> Vec<f32> {
    let mut state = 1;
    (0..rows * cols).map(|_| (0.02 * distribution(&mut state)) as f32).collect()
}

#[test]
fn errors_are_not_larger_than_those_of_ggml() {
    let ember = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/ember/ember.safetensors");
    let ember = WeightSource::open_component(ember, Component::Transformer).unwrap();
    // ggml's errors are those of the weights as bf16.
    let trained = ember.tensor(LAYER).unwrap().to_dtype(DType::BF16).unwrap();
    let trained = trained.to_f32().unwrap().into_owned();
    let matrices = [
        ([128, 1024], draw([128, 1024], normal)),
        ([128, 1024], draw([128, 1024], laplacian)),
        ([384, 1536], trained),
    ];
    for (format, ggml) in GGML {
        for ((shape, values), ggml) in matrices.iter().zip(ggml) {
            let found = quantize(format, *shape, values).unwrap();
            let squares = found.iter().zip(values).map(|(f, v)| (f64::from(*f) - f64::from(*v)).powi(2));
            let ratio = squares.sum::<f64>() / ggml;
            // The bytes of the simpler formats are those of ggml; their sums differ by rounding.
            assert!(ratio < 1.0 + 1e-6, "{format} {shape:?}: {ratio} times the error of ggml");
        }
    }
}

#[test]
fn hard_values_stay_finite_and_close() {
    let mut outlier = draw([1, 256], normal);
    outlier[77] = -4000.0;
    let mut one = vec![0.0; 256];
    one[3] = 1.5;
    let cases: [(&str, Vec<f32>, f32); 12] = [
        ("zeros", vec![0.0; 256], 0.0),
        ("negative zeros", vec![-0.0; 256], 0.0),
        ("all equal", vec![0.3; 256], 0.02),
        ("all equal and negative", vec![-0.3; 256], 0.02),
        ("one value", one, 0.2),
        ("one outlier", outlier, 0.1),
        ("large", (0..256).map(|i| (i as f32 - 128.0) * 500.0).collect(), 0.3),
        ("only positive", (0..256).map(|i| 1.0 + i as f32 / 256.0).collect(), 0.3),
        ("only negative", (0..256).map(|i| -1.0 - i as f32 / 256.0).collect(), 0.3),
        ("small", (0..256).map(|i| (i as f32 - 128.0) * 1e-9).collect(), 1.01),
        ("almost subnormal", (0..256).map(|i| (i as f32 - 128.0) * 1e-37).collect(), 1.01),
        ("subnormal", (0..256).map(|i| f32::from_bits(i % 7)).collect(), 1.01),
    ];
    for format in WRITTEN {
        for (name, values, limit) in &cases {
            let found = quantize(format, [1, 256], values).unwrap();
            let largest = values.iter().fold(0f32, |max, v| max.max(v.abs()));
            for (f, v) in found.iter().zip(values) {
                assert!(f.is_finite() && (f - v).abs() <= limit * largest, "{format}, {name}: {f} for {v}");
            }
        }
    }
}

#[test]
fn values_that_no_block_can_hold_are_errors() {
    for format in WRITTEN {
        for value in [65536.0, 1e10, 1e38, f32::MAX] {
            let mut values = draw([2, 256], normal);
            values[300] = -value;
            let fits = matches!(format, Format::F8E4M3 | Format::NvFp4) && value < f32::MAX;
            match quantize(format, [2, 256], &values) {
                Ok(found) => assert!(fits && found.iter().all(|v| v.is_finite()), "{format} {value}"),
                Err(error) => {
                    let message = error.to_string();
                    let words = [LAYER, format.name(), "too large", &format!("{value:e}")];
                    assert!(!fits && words.iter().all(|word| message.contains(word)), "{message}");
                }
            }
        }
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = draw([2, 256], normal);
            values[300] = value;
            let error = quantize(format, [2, 256], &values).unwrap_err();
            assert!(matches!(error, Error::NotFinite { .. }), "{format} {value}: {error}");
        }
    }
}

#[test]
fn formats_that_are_only_read_are_not_written() {
    for format in [Format::Iq4Nl, Format::Iq4Xs] {
        let message = quantize(format, [1, 256], &[0.5; 256]).unwrap_err().to_string();
        assert!(message.ends_with(&format!("Kiln reads {format}, but can't write it")), "{message}");
    }
}
