//! The generators against values drawn by torch (`testdata/rng`, made by scripts in `tools/golden`).

use std::path::PathBuf;

use kiln_tensor::rng::{CudaLayout, Generator, TorchCpu, TorchCuda};
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
        let hash = kiln_base::hex(Sha256::digest(&bytes));
        assert_eq!(hash, case["sha256_f32le"].as_str().unwrap(), "{case}");
    }
}

#[test]
fn consecutive_cpu_draws_keep_the_cached_second_sample() {
    let bytes = read("torch_rng.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut generator = TorchCpu::new(7);
    for (i, n) in [3, 16, 1, 5, 20, 2].into_iter().enumerate() {
        assert_eq!(generator.randn(n), f32s(&file, &format!("sequence.seed7.{i}.n{n}")), "draw {i}");
    }
}

#[test]
fn cpu_draws_in_low_precision_are_the_rounded_f32_draw_since_torch_2_13() {
    let bytes = read("torch_rng.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let drawn = TorchCpu::new(42).randn(128 * 4 * 4);
    let rounded: Vec<u16> = drawn.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
    assert_eq!(rounded, u16s(&file, "bf16.seed42.1x128x4x4"));
    let rounded: Vec<u16> = drawn.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
    assert_eq!(rounded, u16s(&file, "f16.seed42.1x128x4x4"));
}

/// Tolerance of CUDA draws; the largest measured difference is 1.2e-6. The device's sine and cosine are off by up to
/// 3.4e-7, and the radius multiplies that.
const CUDA_LIMIT: f32 = 1.5e-6;

/// The values of a long draw that the golden file keeps.
fn kept_values(drawn: &[f32], name: &str) -> Vec<f32> {
    match name.rsplit('.').next().unwrap() {
        "head" => drawn[..2048].to_vec(),
        "tail" => drawn[drawn.len() - 2048..].to_vec(),
        "every1021" => drawn.iter().copied().step_by(1021).collect(),
        _ => drawn.to_vec(),
    }
}

fn assert_close(name: &str, drawn: &[f32], want: &[f32]) {
    assert_eq!(drawn.len(), want.len(), "{name}");
    for (i, (a, b)) in drawn.iter().zip(want).enumerate() {
        assert!((a - b).abs() <= CUDA_LIMIT, "{name}[{i}]: drew {a}, torch {b}");
    }
}

#[test]
fn cuda_draws_are_close_to_those_of_an_h200_at_every_length() {
    let bytes = read("torch_cuda.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut seen, mut sum) = (0usize, 0.0f64);
    for name in file.names().into_iter().filter(|n| n.starts_with("f32.")) {
        let drawn = TorchCuda::new(number(name, "seed")).randn(number(name, ".n") as usize);
        let (kept, want) = (kept_values(&drawn, name), f32s(&file, name));
        assert_close(name, &kept, &want);
        seen += want.len();
        sum += kept.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    }
    assert!(seen > 25_000, "{seen} values compared");
    let rms = (sum / seen as f64).sqrt();
    assert!(rms < 2e-7, "root mean square error {rms}");
}

#[test]
fn consecutive_cuda_draws_advance_the_offset_as_torch_does() {
    let bytes = read("torch_cuda.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap();
    let draws: Vec<serde_json::Value> = serde_json::from_str(&metadata["draws"]).unwrap();
    let layout = CudaLayout {
        multiprocessors: metadata["multiprocessors"].parse().unwrap(),
        threads_per_multiprocessor: metadata["threads_per_multiprocessor"].parse().unwrap(),
    };
    assert_eq!(layout, CudaLayout::default());
    let mut generator = TorchCuda::with_layout(7, layout);
    let mut seen = 0;
    for draw in draws.iter().filter(|d| d["name"].as_str().unwrap().starts_with("sequence.")) {
        let name = draw["name"].as_str().unwrap();
        assert_eq!(generator.offset(), draw["offset_before"].as_u64().unwrap(), "before {name}");
        let drawn = generator.randn(draw["n"].as_u64().unwrap() as usize);
        assert_eq!(generator.offset(), draw["offset_after"].as_u64().unwrap(), "after {name}");
        for kept in file.names().into_iter().filter(|k| k.starts_with(name)) {
            assert_close(kept, &kept_values(&drawn, kept), &f32s(&file, kept));
            seen += 1;
        }
    }
    assert_eq!(seen, 9);
}

#[test]
fn generator_draws_the_values_of_its_variant() {
    assert_eq!(Generator::cpu(3).randn(50), TorchCpu::new(3).randn(50));
    assert_eq!(Generator::cuda(3).randn(50), TorchCuda::new(3).randn(50));
    assert_ne!(Generator::cpu(3).randn(50), Generator::cuda(3).randn(50));
}

/// `testdata/taef2` holds a recipe instead of five megabytes of random weights: it must give torch's exact bytes.
#[test]
fn random_weights_of_a_recipe_equal_torch() {
    let recipe: serde_json::Value = serde_json::from_slice(&read("../taef2/recipe.json")).unwrap();
    let mut hash = Sha256::new();
    for tensor in recipe["tensors"].as_array().unwrap() {
        let number = |key: &str| tensor[key].as_f64().unwrap() as f32;
        let (mean, std) = (number("mean"), number("std"));
        let n: u64 = tensor["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).product();
        let drawn = TorchCpu::new(tensor["seed"].as_u64().unwrap()).randn(n as usize);
        let rounded: Vec<u8> =
            drawn.iter().flat_map(|x| f16::from_f32(mean + std * x).to_le_bytes()).collect();
        hash.update(&rounded);
    }
    assert_eq!(kiln_base::hex(hash.finalize()), recipe["sha256"].as_str().unwrap());
}
