//! 16-bit draws against torch 2.11 (`testdata/rng/torch_rng_half.json`, made by `tools/golden/cpu_rng_half.py`).

use kiln_tensor::rng::{Generator, HalfDType, TorchCpu};
use kiln_tensor::{bf16, f16};
use serde::Deserialize;
use sha2::{Digest, Sha256};

#[derive(Deserialize)]
struct Golden {
    draws: Vec<Draw>,
    latents: Vec<Latents>,
    sequences: Vec<Sequence>,
}

#[derive(Deserialize)]
struct Draw {
    dtype: String,
    seed: u64,
    n: usize,
    bits: String,
}

#[derive(Deserialize)]
struct Latents {
    dtype: String,
    seed: u64,
    shape: Vec<usize>,
    first: String,
    sha256: String,
}

#[derive(Deserialize)]
struct Sequence {
    dtype: String,
    seed: u64,
    draws: Vec<SequenceDraw>,
}

#[derive(Deserialize)]
struct SequenceDraw {
    n: usize,
    bits: String,
}

fn golden() -> Golden {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/rng/torch_rng_half.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn half(dtype: &str) -> HalfDType {
    match dtype {
        "bf16" => HalfDType::Bf16,
        "f16" => HalfDType::F16,
        other => panic!("{other} is not a 16-bit type"),
    }
}

/// The bits of `values`, which must be exact values of the 16-bit type.
fn bits(values: &[f32], half: HalfDType) -> Vec<u16> {
    let bits = |&x: &f32| {
        let (word, back) = match half {
            HalfDType::Bf16 => (bf16::from_f32(x).to_bits(), bf16::from_f32(x).to_f32()),
            HalfDType::F16 => (f16::from_f32(x).to_bits(), f16::from_f32(x).to_f32()),
        };
        assert_eq!(x, back, "{x} is not a {half:?} value");
        word
    };
    values.iter().map(bits).collect()
}

fn hex_words(words: &[u16]) -> String {
    words.iter().map(|word| format!("{word:04x}")).collect()
}

#[test]
fn draws_of_every_length_equal_torch_bit_for_bit() {
    let draws = golden().draws;
    assert_eq!(draws.len(), 42);
    for Draw { dtype, seed, n, bits: want } in draws {
        let drawn = TorchCpu::new(seed).randn_half(n, half(&dtype));
        assert_eq!(hex_words(&bits(&drawn, half(&dtype))), want, "{dtype}, seed {seed}, {n} values");
    }
}

/// The latents of 1024 × 1024 cover every possible radius and angle.
#[test]
fn latents_equal_torch_bit_for_bit() {
    let latents = golden().latents;
    assert_eq!(latents.len(), 8);
    for Latents { dtype, seed, shape, first, sha256 } in latents {
        let drawn = TorchCpu::new(seed).randn_half(shape.iter().product(), half(&dtype));
        let words = bits(&drawn, half(&dtype));
        assert_eq!(hex_words(&words[..16]), first, "{dtype}, seed {seed}, {shape:?}");
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(kiln_base::hex(Sha256::digest(&bytes)), sha256, "{dtype}, seed {seed}, {shape:?}");
    }
}

#[test]
fn consecutive_draws_keep_the_cached_second_sample() {
    for Sequence { dtype, seed, draws } in golden().sequences {
        let half = half(&dtype);
        let mut generator = Generator::cpu_half(seed, half);
        for (i, SequenceDraw { n, bits: want }) in draws.into_iter().enumerate() {
            assert_eq!(hex_words(&bits(&generator.randn(n), half)), want, "{dtype}, draw {i}");
        }
    }
}
