//! The generators against values that torch drew (`testdata/rng`; the scripts are in `tools/golden`).

use std::path::PathBuf;

use kiln_tensor::rng::TorchCpu;
use kiln_tensor::{bf16, f16};
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};

fn read(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/rng").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = file.tensor(name).unwrap().data().to_vec();
    data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn u16s(file: &SafeTensors<'_>, name: &str) -> Vec<u16> {
    let data = file.tensor(name).unwrap().data().to_vec();
    data.chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The digits that follow `tag` in a tensor's name: `number("randn.seed42.n3", "seed")` is 42.
fn number(name: &str, tag: &str) -> u64 {
    let rest = &name[name.find(tag).unwrap() + tag.len()..];
    let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
    digits.parse().unwrap()
}

#[test]
fn cpu_draws_of_every_length_equal_torch_bit_for_bit() {
    let bytes = read("torch_rng.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut seen = 0;
    for name in file.names().into_iter().filter(|n| n.starts_with("randn.")) {
        let want = f32s(&file, name);
        assert_eq!(TorchCpu::new(number(name, "seed")).randn(want.len()), want, "{name}");
        seen += 1;
    }
    assert_eq!(seen, 44);
}

#[test]
fn cpu_latents_equal_torch_bit_for_bit_also_at_1024_by_1024() {
    let report: serde_json::Value = serde_json::from_slice(&read("torch_rng.json")).unwrap();
    let latents = report["latents"].as_array().unwrap();
    assert_eq!(latents.len(), 4);
    for case in latents {
        let n: u64 = case["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).product();
        let drawn = TorchCpu::new(case["seed"].as_u64().unwrap()).randn(n as usize);
        let bytes: Vec<u8> = drawn.iter().flat_map(|v| v.to_le_bytes()).collect();
        let hash: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hash, case["sha256_f32le"].as_str().unwrap(), "{case}");
    }
}

#[test]
fn cpu_draws_in_a_row_keep_the_cached_half_of_a_short_one() {
    let bytes = read("torch_rng.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut generator = TorchCpu::new(7);
    for (i, n) in [3, 16, 1, 5, 20, 2].into_iter().enumerate() {
        assert_eq!(generator.randn(n), f32s(&file, &format!("sequence.seed7.{i}.n{n}")), "draw {i}");
    }
}

#[test]
fn cpu_draws_in_low_precision_are_the_rounded_f32_draw() {
    let bytes = read("torch_rng.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let drawn = TorchCpu::new(42).randn(128 * 4 * 4);
    let rounded: Vec<u16> = drawn.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
    assert_eq!(rounded, u16s(&file, "bf16.seed42.1x128x4x4"));
    let rounded: Vec<u16> = drawn.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
    assert_eq!(rounded, u16s(&file, "f16.seed42.1x128x4x4"));
}
