//! TAEF2 against torch: with random weights from a recipe, and with the real ones if `KILN_GOLDEN` has them.

use std::path::Path;

use kiln_cpu::CpuBackend;
use kiln_nn::taef2::Taef2;
use kiln_ops::Backend;
use kiln_tensor::rng::TorchCpu;
use kiln_tensor::{DType, HostTensor, f16};
use kiln_weights::WeightSource;
use serde::Deserialize;

#[derive(Deserialize)]
struct Recipe {
    tensors: Vec<RandomTensor>,
}

/// A tensor of random f16 values.
#[derive(Deserialize)]
struct RandomTensor {
    name: String,
    shape: Vec<usize>,
    mean: f32,
    std: f32,
    seed: u64,
}

impl RandomTensor {
    fn tensor(&self) -> HostTensor {
        let count = self.shape.iter().product();
        let values = TorchCpu::new(self.seed).randn(count).into_iter();
        let bytes: Vec<u8> =
            values.flat_map(|v| f16::from_f32(self.mean + self.std * v).to_le_bytes()).collect();
        HostTensor::new(DType::F16, self.shape.clone(), bytes.into()).unwrap()
    }
}

/// Writes the random model to a file, with its tensors renamed by `rename`.
fn write_random(file: &Path, rename: impl Fn(&str) -> String) {
    let recipe = std::fs::read(kiln_golden::testdata().join("taef2/recipe.json")).unwrap();
    let recipe: Recipe = serde_json::from_slice(&recipe).unwrap();
    let names: Vec<String> = recipe.tensors.iter().map(|t| rename(&t.name)).collect();
    let tensors: Vec<(&str, HostTensor)> =
        names.iter().zip(&recipe.tensors).map(|(name, t)| (name.as_str(), t.tensor())).collect();
    kiln_weights::save::save(file, &tensors, &Default::default()).unwrap();
}

/// `encoder.N` as `encoder.layers.N`, `decoder.N` as `decoder.layers.(N - 1)`.
fn with_layers(name: &str) -> String {
    let mut parts = name.splitn(3, '.');
    let (half, index) = (parts.next().unwrap(), parts.next().unwrap().parse::<usize>().unwrap());
    let rest = parts.next().unwrap();
    format!("{half}.layers.{}.{rest}", if half == "decoder" { index - 1 } else { index })
}

/// A dumped tensor `[1, c, h, w]` as `[h, w, c]`.
fn channels_last(dump: &WeightSource, name: &str) -> HostTensor {
    let x = dump.tensor(name).unwrap();
    let dims = x.shape().dims().to_vec();
    let (channels, pixels) = (dims[1], dims[2] * dims[3]);
    let values = x.to_f32().unwrap();
    let last = (0..values.len()).map(|i| values[(i % channels) * pixels + i / channels]).collect();
    HostTensor::from_f32([dims[2], dims[3], channels], last).unwrap()
}

fn relative_error(ours: &HostTensor, expected: &HostTensor) -> f64 {
    let (a, b) = (ours.to_f32().unwrap(), expected.to_f32().unwrap());
    assert_eq!(a.len(), b.len());
    let sum = |f: &dyn Fn(f64, f64) -> f64| {
        a.iter().zip(b.iter()).map(|(x, y)| f(f64::from(*x), f64::from(*y))).sum::<f64>().sqrt()
    };
    sum(&|x, y| (x - y).powi(2)) / sum(&|_, y| y * y)
}

/// Encodes `image` and decodes `latents`, and compares both results.
fn check(weights: &Path, dump: &WeightSource, [image, encoded, latents, decoded]: [&str; 4]) {
    let b = CpuBackend::new(Default::default()).unwrap();
    let source = WeightSource::open(weights).unwrap();
    assert!(Taef2::<CpuBackend>::matches(&source.root()));
    let taef2 = Taef2::load(&b, &source.root(), DType::F32).unwrap();
    let upload = |name: &str| b.upload(&channels_last(dump, name), DType::F32).unwrap();

    let ours = b.download(&taef2.encode(&b, upload(image), &mut ()).unwrap()).unwrap();
    let error = relative_error(&ours, &channels_last(dump, encoded));
    assert!(error < 1e-5, "encode: {error:e}");

    let ours = b.download(&taef2.decode(&b, upload(latents), &mut ()).unwrap()).unwrap();
    let error = relative_error(&ours, &channels_last(dump, decoded));
    assert!(error < 1e-5, "decode: {error:e}");
}

#[test]
fn both_layer_namings_equal_torch() {
    let folder = tempfile::tempdir().unwrap();
    let dump = WeightSource::open(kiln_golden::testdata().join("taef2/reference.safetensors")).unwrap();
    let names = ["picture", "encoded", "latents", "decoded"];
    write_random(&folder.path().join("numbered.safetensors"), str::to_owned);
    check(&folder.path().join("numbered.safetensors"), &dump, names);
    write_random(&folder.path().join("layered.safetensors"), with_layers);
    check(&folder.path().join("layered.safetensors"), &dump, names);
}

/// TAEF2's own weights are not part of the repository.
#[test]
fn the_real_weights_equal_torch() {
    let set = std::env::var_os("KILN_GOLDEN").map(|set| Path::new(&set).join("taef2"));
    let Some(folder) = set.filter(|folder| folder.join("taef2.safetensors").is_file()) else {
        println!("skipped: KILN_GOLDEN names no folder with taef2/taef2.safetensors");
        return;
    };
    let dump = WeightSource::open(folder.join("astronaut_ref.safetensors")).unwrap();
    let names = ["crop_input", "crop_latents", "crop_latents", "crop_decoded"];
    check(&folder.join("taef2.safetensors"), &dump, names);
}
