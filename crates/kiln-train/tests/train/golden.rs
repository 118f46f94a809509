//! Loss, gradients and weights after 20 steps against diffusers' transformer with PEFT's adapters (`testdata/train`, made by
//! `tools/golden/train.py`). Everything that goes in is drawn from names, as the script does.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kiln_nn::ResidencyPlan;
use kiln_nn::transformer::{Config, Transformer};
use kiln_ops::{Backend, Reference, TrainingBackend};
use kiln_tensor::rng::TorchCpu;
use kiln_tensor::{DType, HostTensor, Shape, bf16};
use kiln_train::{
    AdapterKind, AdapterSettings, Example, LearningRate, NoisyExample, Optimizer, ReferenceLatents, Targets,
    TrainSettings, Trainer,
};
use kiln_weights::{TrainedModule, WeightSource, save};
use serde::Deserialize;

/// The file of that name; `KILN_TESTDATA` overrides the folder, for tests built on another machine.
fn file(name: &str) -> PathBuf {
    let testdata = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata");
    let folder = std::env::var_os("KILN_TESTDATA").map_or_else(|| PathBuf::from(testdata), PathBuf::from);
    folder.join("train").join(name)
}

#[derive(Deserialize)]
struct Cases {
    steps: u64,
    lr: f32,
    weight_decay: f32,
    cases: BTreeMap<String, Case>,
}

#[derive(Deserialize)]
struct Case {
    config: Config,
    kind: AdapterKind,
    rank: usize,
    alpha: f32,
    /// Text tokens, height, width, and heights and widths of references.
    examples: Vec<(usize, usize, usize, Vec<[usize; 2]>)>,
    #[serde(default)]
    targets: String,
    factor: Option<usize>,
    max_grad_norm: Option<f32>,
    bf16: Bf16Distances,
}

/// How far torch's own bf16 is off from f32: the loss relatively, all gradients together by their relative L2 distance.
#[derive(Deserialize)]
struct Bf16Distances {
    loss: f32,
    gradient: f64,
}

/// zlib's CRC-32.
fn crc32(text: &str) -> u32 {
    !text.bytes().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    })
}

/// `common.draw`.
pub(crate) fn draw(tag: &str, shape: impl Into<Shape>) -> HostTensor {
    let shape = shape.into();
    let values = TorchCpu::new(crc32(tag).into()).randn(shape.numel());
    HostTensor::from_f32(shape, values).unwrap()
}

fn map(x: &HostTensor, f: impl Fn(f32) -> f32) -> HostTensor {
    HostTensor::from_f32(x.shape().clone(), x.to_f32().unwrap().iter().map(|v| f(*v)).collect()).unwrap()
}

/// A transformer whose weights are drawn from names that begin with `tag`.
pub(crate) fn transformer<B: Backend>(b: &B, tag: &str, config: &Config, dtype: DType) -> Transformer<B> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let exact = |v: f32| bf16::from_f32(v).to_f32();
    let mut tensors = Vec::new();
    for layer in config.linear_layers() {
        let name = format!("{}.weight", layer.name);
        let factor = (1.0 / (layer.cols as f64).sqrt()) as f32;
        let weight = map(&draw(&format!("{tag}/{name}"), [layer.rows, layer.cols]), |z| exact(z * factor));
        tensors.push((name, weight));
    }
    let norms = |blocks: &str, count: usize, names: &[&str]| {
        let all = (0..count).flat_map(|i| names.iter().map(move |n| (i, n)));
        all.map(|(i, norm)| format!("{blocks}.{i}.attn.{norm}.weight")).collect::<Vec<_>>()
    };
    let double = ["norm_q", "norm_k", "norm_added_q", "norm_added_k"];
    let mut names = norms("transformer_blocks", config.num_layers, &double);
    names.extend(norms("single_transformer_blocks", config.num_single_layers, &double[..2]));
    for name in names {
        let z = draw(&format!("{tag}/{name}"), [config.attention_head_dim]);
        tensors.push((name, map(&z, |z| exact(1.2 + 0.3 * z))));
    }
    let tensors: Vec<(&str, HostTensor)> = tensors.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    save::save(&file, &tensors, &BTreeMap::new()).unwrap();
    let source = WeightSource::open(&file).unwrap();
    Transformer::load(b, &source.root(), config, dtype, &ResidencyPlan::all_on_device()).unwrap()
}

/// Example `i` of a case.
pub(crate) fn example(
    tag: &str,
    i: usize,
    config: &Config,
    (text, height, width, references): &(usize, usize, usize, Vec<[usize; 2]>),
) -> Example {
    let channels = config.in_channels;
    let reference = |(j, &[height, width]): (usize, &[usize; 2])| ReferenceLatents {
        latents: draw(&format!("{tag}/reference{i}/{j}"), [height * width, channels]),
        height,
        width,
    };
    Example {
        latents: draw(&format!("{tag}/latents{i}"), [height * width, channels]),
        height: *height,
        width: *width,
        references: references.iter().enumerate().map(reference).collect(),
        text: draw(&format!("{tag}/text{i}"), [*text, config.joint_attention_dim]),
    }
}

fn noisy<'a>(tag: &str, examples: &'a [Example], step: u64) -> Vec<NoisyExample<'a>> {
    let noisy = |(i, example): (usize, &'a Example)| NoisyExample {
        example,
        noise: draw(&format!("{tag}/noise{i}/{step}"), example.latents.shape().clone()),
        sigma: ((((7 * step + 3 * i as u64) % 10) as f64 + 0.5) / 10.0) as f32,
    };
    examples.iter().enumerate().map(noisy).collect()
}

/// Relative L2 distance.
fn distance(found: &HostTensor, expected: &HostTensor) -> f64 {
    assert_eq!(found.shape(), expected.shape());
    let (found, expected) = (found.to_f32().unwrap(), expected.to_f32().unwrap());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let error = squares(&mut found.iter().zip(expected.iter()).map(|(f, e)| f64::from(*f) - f64::from(*e)));
    (error / squares(&mut expected.iter().map(|e| f64::from(*e)))).sqrt()
}

/// The drawn adapter of a case; magnitudes are stored with the results.
fn adapter(tag: &str, modules: Vec<TrainedModule>, stored: &WeightSource) -> Vec<TrainedModule> {
    let module = |mut module: TrainedModule| {
        for (name, tensor) in &mut module.tensors {
            let full = format!("{}.{name}", module.layer);
            *tensor = if name == "lora_magnitude_vector" {
                stored.tensor(&format!("start.{full}")).unwrap()
            } else {
                map(&draw(&format!("{tag}/{full}"), tensor.shape().clone()), |z| 0.3 * z)
            };
        }
        module
    };
    modules.into_iter().map(module).collect()
}

/// A trainer with the case's adapter, and its examples.
fn trainer<B: TrainingBackend>(
    b: &B,
    (tag, case): (&str, &Case),
    all: &Cases,
    stored: &WeightSource,
    [checkpointing, bf16]: [bool; 2],
) -> (Trainer<B>, Vec<Example>) {
    let layers = case.config.linear_layers();
    let in_block = |name: &str| {
        name.starts_with("transformer_blocks.") || name.starts_with("single_transformer_blocks.")
    };
    let targets = layers.iter().filter(|l| in_block(&l.name) && l.name.starts_with(&case.targets));
    let settings = TrainSettings {
        adapter: AdapterSettings {
            kind: case.kind,
            rank: case.rank,
            alpha: Some(case.alpha),
            targets: Targets::Patterns(targets.map(|layer| layer.name.clone()).collect()),
            factor: case.factor,
            ..AdapterSettings::default()
        },
        optimizer: Optimizer::AdamW { betas: [0.9, 0.999], eps: 1e-8, weight_decay: all.weight_decay },
        learning_rate: LearningRate { peak: all.lr, ..LearningRate::default() },
        max_grad_norm: case.max_grad_norm,
        checkpointing,
        bf16,
        ..TrainSettings::default()
    };
    let transformer = transformer(b, tag, &case.config, if bf16 { DType::BF16 } else { DType::F32 });
    let mut trainer = Trainer::new(b, transformer, settings).unwrap();
    let start = adapter(tag, trainer.adapter().unwrap(), stored);
    trainer.set_adapter(&start).unwrap();
    let examples: Vec<Example> =
        case.examples.iter().enumerate().map(|(i, e)| example(tag, i, &case.config, e)).collect();
    (trainer, examples)
}

fn stored(tag: &str) -> WeightSource {
    WeightSource::open(file(&format!("{tag}.safetensors"))).unwrap()
}

/// In bf16, loss and gradients are about as near to torch's in f32 as torch's own in bf16.
fn check_bf16<B: TrainingBackend>(b: &B, tag: &str, case: &Case, all: &Cases) {
    let stored = stored(tag);
    let (mut trainer, examples) = trainer(b, (tag, case), all, &stored, [false, true]);
    let (loss, gradients) = trainer.gradients(&noisy(tag, &examples, 0)).unwrap();
    let expected = stored.tensor("loss").unwrap().to_f32().unwrap()[0];
    let limit = (2.0 * case.bf16.loss).max(1e-2);
    assert!((loss / expected - 1.0).abs() < limit, "{tag}: loss {loss}, expected {expected}");
    let (mut error, mut norm) = (0.0, 0.0);
    for (name, gradient) in &gradients {
        let expected = stored.tensor(&format!("grad.{name}")).unwrap();
        let squares = expected.to_f32().unwrap().iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        error += distance(gradient, &expected).powi(2) * squares;
        norm += squares;
    }
    let (found, torch) = ((error / norm).sqrt(), case.bf16.gradient);
    assert!(found < 1.5 * torch, "{tag}: in bf16 the gradients differ by {found:.4}, torch's by {torch:.4}");
}

fn check_case<B: TrainingBackend>(b: &B, tag: &str, case: &Case, all: &Cases, checkpointing: bool) {
    let stored = stored(tag);
    let (mut trainer, examples) = trainer(b, (tag, case), all, &stored, [checkpointing, false]);
    let (loss, gradients) = trainer.gradients(&noisy(tag, &examples, 0)).unwrap();
    let expected = stored.tensor("loss").unwrap().to_f32().unwrap()[0];
    assert!((loss - expected).abs() < 1e-5 * expected, "{tag}: loss {loss}, expected {expected}");
    let mut checked = 0;
    for (name, gradient) in &gradients {
        let error = distance(gradient, &stored.tensor(&format!("grad.{name}")).unwrap());
        assert!(error < 1e-5, "{tag}: the gradient of {name} differs by {error:.2e}");
        checked += 1;
    }
    assert_eq!(checked, stored.names().filter(|name| name.starts_with("grad.")).count(), "{tag}");

    let mut report = None;
    for step in 0..all.steps {
        report = Some(trainer.step_noisy(&[&noisy(tag, &examples, step)]).unwrap());
    }
    let (last, expected) = (report.unwrap().loss, stored.tensor("last_loss").unwrap().to_f32().unwrap()[0]);
    assert!((last - expected).abs() < 1e-5 * expected, "{tag}: last loss {last}, expected {expected}");
    for module in trainer.adapter().unwrap() {
        for (name, tensor) in &module.tensors {
            let name = format!("{}.{name}", module.layer);
            let error = distance(tensor, &stored.tensor(&format!("after.{name}")).unwrap());
            assert!(error < 1e-5, "{tag}: after {} steps {name} differs by {error:.2e}", all.steps);
        }
    }
}

fn cases() -> Cases {
    serde_json::from_slice(&std::fs::read(file("cases.json")).unwrap()).unwrap()
}

#[test]
fn the_reference_trains_as_torch_does() {
    let all = cases();
    for (i, (tag, case)) in all.cases.iter().enumerate() {
        check_case(&Reference::new(), tag, case, &all, i % 2 == 0);
    }
}

#[test]
fn the_cpu_trains_as_torch_does() {
    let (b, all) = (kiln_cpu::CpuBackend::new(kiln_cpu::CpuOptions::default()).unwrap(), cases());
    for (i, (tag, case)) in all.cases.iter().enumerate() {
        check_case(&b, tag, case, &all, i % 2 == 1);
        check_bf16(&b, tag, case, &all);
    }
}

#[test]
fn the_gpu_trains_as_torch_does() {
    let b = match kiln_cuda::CudaBackend::new(&kiln_cuda::Options::default()) {
        Ok(b) => b,
        Err(e) => return println!("skipped: no GPU to test on: {e}"),
    };
    let all = cases();
    for (i, (tag, case)) in all.cases.iter().enumerate() {
        check_case(&b, tag, case, &all, i % 2 == 0);
        check_bf16(&b, tag, case, &all);
    }
}
