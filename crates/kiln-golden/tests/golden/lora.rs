//! LoRAs in a whole pipeline: every layout gives the same latents, and LoRAs can be switched while the model is loaded.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{LocalFiles, LoraRef, Model, Plan, PlannedLora, Request};
use kiln_golden::{Checkpoint, testdata};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{LinearPrecision, WeightSource, save};

/// The tiny klein and its temporary folder.
struct Klein {
    _folder: Checkpoint,
    pipeline: Pipeline<CpuBackend>,
}

fn klein(options: &LoadOptions) -> Klein {
    klein_with(options, &[])
}

/// Loads the model with these LoRAs.
fn klein_with(options: &LoadOptions, loras: &[(&Path, f32)]) -> Klein {
    let folder = Checkpoint::assemble(&testdata(), "klein").unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let options = LoadOptions { loras: planned(&model, loras).unwrap(), ..options.clone() };
    let pipeline = Pipeline::load(backend, &model, &options, &mut ()).unwrap();
    Klein { _folder: folder, pipeline }
}

fn request(loras: &[(&Path, f32)]) -> Request {
    let lora = |&(path, weight): &(&Path, f32)| LoraRef { path: path.into(), weight, sha256: None };
    Request {
        width: Some(64),
        height: Some(48),
        steps: Some(2),
        max_tokens: Some(32),
        loras: loras.iter().map(lora).collect(),
        ..Request::new("fox")
    }
}

fn planned(model: &Arc<Model>, loras: &[(&Path, f32)]) -> kiln_engine::Result<Vec<PlannedLora>> {
    Ok(Plan::new(model, &request(loras), &LocalFiles)?.loras)
}

impl Klein {
    fn planned(&self, loras: &[(&Path, f32)]) -> kiln_engine::Result<Vec<PlannedLora>> {
        planned(self.pipeline.model(), loras)
    }

    /// Switches to these LoRAs and returns the latents.
    fn latents_with(&mut self, loras: &[(&Path, f32)]) -> Vec<f32> {
        let loras = self.planned(loras).unwrap();
        let reports = self.pipeline.set_loras(&loras, false).unwrap();
        assert_eq!(reports.len(), loras.len());
        assert!(reports.iter().all(|r| r.matched == r.total && r.total > 0), "{reports:?}");
        assert_eq!(self.pipeline.loras(), (&loras[..], false));
        self.latents()
    }

    fn latents(&self) -> Vec<f32> {
        let plan = Plan::new(self.pipeline.model(), &request(&[]), &LocalFiles).unwrap();
        let images = self.pipeline.generate(&plan, &mut ()).unwrap();
        images[0].latents.to_f32().unwrap().into_owned()
    }
}

fn file(name: &str) -> PathBuf {
    testdata().join("tiny/lora").join(name)
}

/// The relative L2 distance.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    squares(&mut a.iter().zip(b).map(|(a, b)| a - b)) / squares(&mut b.iter().copied())
}

type Tensors = Vec<(String, HostTensor)>;
/// Converts a module's down and up matrix to another layout.
type Convert = fn(&str, HostTensor, HostTensor) -> Tensors;

fn lora(stem: String, down: HostTensor, up: HostTensor) -> Tensors {
    vec![(format!("{stem}.lora_down.weight"), down), (format!("{stem}.lora_up.weight"), up)]
}

fn split(module: &str, down: HostTensor, up: HostTensor) -> Tensors {
    let dim = down.shape().last();
    let cuts = match module {
        _ if module.ends_with(".qkv") => vec![0, dim, 2 * dim, 3 * dim],
        _ if module.ends_with(".linear1") => vec![0, dim, 2 * dim, 3 * dim, up.shape().rows()],
        _ => return lora(format!("transformer.{module}"), down, up),
    };
    let part = |(i, cut): (usize, &[usize])| {
        lora(format!("transformer.{module}.{i}"), down.clone(), up.rows(cut[0]..cut[1]).unwrap())
    };
    cuts.windows(2).enumerate().flat_map(part).collect()
}

fn ones(rows: usize, cols: usize) -> HostTensor {
    HostTensor::from_f32([rows, cols], vec![1.0; rows * cols]).unwrap()
}

fn lokr(stem: String, down: HostTensor, up: HostTensor) -> Tensors {
    vec![
        (format!("{stem}.lokr_w1"), ones(1, 1)),
        (format!("{stem}.lokr_w2_a"), up),
        (format!("{stem}.lokr_w2_b"), down),
    ]
}

fn loha(stem: String, down: HostTensor, up: HostTensor) -> Tensors {
    vec![
        (format!("{stem}.hada_w1_a"), ones(up.shape().rows(), 1)),
        (format!("{stem}.hada_w1_b"), ones(1, down.shape().last())),
        (format!("{stem}.hada_w2_a"), up),
        (format!("{stem}.hada_w2_b"), down),
    ]
}

/// Source file, layout and conversion.
const LAYOUTS: [(&str, &str, Convert); 9] = [
    ("bfl", "kohya", |m, down, up| lora(format!("lora_unet_{}", m.replace('.', "_")), down, up)),
    ("bfl", "peft", |m, down, up| lora(format!("base_model.model.{m}"), down, up)),
    ("bfl", "onetrainer", split),
    ("bfl", "lokr", |m, down, up| lokr(format!("diffusion_model.{m}"), down, up)),
    ("bfl", "loha", |m, down, up| loha(format!("diffusion_model.{m}"), down, up)),
    ("diffusers", "flat", |m, down, up| lora(format!("lora_transformer_{}", m.replace('.', "_")), down, up)),
    ("diffusers", "lycoris", |m, down, up| lokr(format!("lycoris_{}", m.replace('.', "_")), down, up)),
    ("diffusers", "mixed", |m, down, up| lora(format!("diffusion_model.{m}"), down, up)),
    ("diffusers", "bare", |m, down, up| lora(m.to_owned(), down, up)),
];

fn write_converted(folder: &Path, from: &str, name: &str, convert: Convert) -> PathBuf {
    let source = WeightSource::open(file(&format!("lora_{from}.safetensors"))).unwrap();
    let mut tensors = Vec::new();
    for key in source.names().filter(|key| key.ends_with(".lora_A.weight")) {
        let stem = key.strip_suffix(".lora_A.weight").unwrap();
        let module = stem.strip_prefix("transformer.").or(stem.strip_prefix("diffusion_model.")).unwrap();
        let up = source.tensor(&format!("{stem}.lora_B.weight")).unwrap();
        tensors.extend(convert(module, source.tensor(key).unwrap(), up));
    }
    let path = folder.join(format!("{name}.safetensors"));
    let tensors: Vec<(&str, HostTensor)> = tensors.iter().map(|(key, t)| (key.as_str(), t.clone())).collect();
    save::save(&path, &tensors, &Default::default()).unwrap();
    path
}

#[test]
fn every_layout_gives_the_same_latents() {
    let folder = tempfile::tempdir().unwrap();
    let mut klein = klein(&LoadOptions::default());
    let without = klein.latents();
    let expected = klein.latents_with(&[(&file("lora_diffusers.safetensors"), 1.0)]);
    assert!(distance(&expected, &without) > 1e-2, "the LoRA has too little effect");
    let found = klein.latents_with(&[(&file("lora_bfl.safetensors"), 1.0)]);
    assert!(distance(&found, &expected) < 1e-5);
    for (from, name, convert) in LAYOUTS {
        let path = write_converted(folder.path(), from, name, convert);
        let error = distance(&klein.latents_with(&[(&path, 1.0)]), &expected);
        assert!(error < 1e-5, "{name}: {error}");
    }
    let doubled = klein.latents_with(&[(&file("lora_diffusers_alpha8.safetensors"), 1.0)]);
    let kohya = klein.latents_with(&[(&file("lora_kohya_alpha8.safetensors"), 1.0)]);
    assert!(distance(&kohya, &doubled) < 1e-5 && distance(&kohya, &expected) > 1e-2);
}

#[test]
fn switching_equals_loading_and_removing_restores() {
    let folder = tempfile::tempdir().unwrap();
    let lokr = write_converted(folder.path(), "bfl", "lokr", LAYOUTS[3].2);
    let alpha8 = file("lora_diffusers_alpha8.safetensors");
    for (dtype, precision) in [
        (DType::F32, LinearPrecision::Float),
        (DType::BF16, LinearPrecision::Float),
        (DType::BF16, LinearPrecision::Int8 { threads: 2 }),
    ] {
        let options = LoadOptions { dtype, linear_precision: precision, ..LoadOptions::default() };
        let mut switched = klein(&options);
        let without = switched.latents();
        let sets: [&[(&Path, f32)]; 3] =
            [&[(&alpha8, 0.5)], &[(&lokr, -1.0), (&alpha8, 0.25)], &[(&lokr, 1.0)]];
        for set in sets {
            let loaded = klein_with(&options, set).latents();
            assert!(
                switched.latents_with(set) == loaded,
                "{dtype}, {precision:?}: differs from a fresh load"
            );
            assert!(distance(&loaded, &without) > 1e-3);
        }
        assert!(switched.latents_with(&[]) == without, "{dtype}, {precision:?}: not restored");
    }
}

#[test]
fn a_rejected_lora_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let lora = file("lora_diffusers.safetensors");
    let mut klein = klein(&LoadOptions::default());
    let before = klein.latents_with(&[(&lora, 1.0)]);
    let unknown = folder.path().join("unknown.safetensors");
    let keys = [
        "transformer.transformer_blocks.77.attn.to_q.lora_A.weight",
        "transformer.transformer_blocks.77.attn.to_q.lora_B.weight",
    ];
    let tensors = [(keys[0], HostTensor::zeros([1, 128])), (keys[1], HostTensor::zeros([128, 1]))];
    save::save(&unknown, &tensors, &Default::default()).unwrap();
    let bfl = file("lora_bfl.safetensors");
    let current = klein.planned(&[(&lora, 1.0)]).unwrap();
    let wrong = klein.planned(&[(&bfl, 1.0), (&unknown, 1.0)]).unwrap();
    assert!(klein.pipeline.set_loras(&wrong, false).is_err());
    assert_eq!(klein.pipeline.loras(), (&current[..], false));
    assert!(klein.latents() == before);
    // The plan rejects a missing file.
    assert!(klein.planned(&[(&bfl, 1.0), (&folder.path().join("none.safetensors"), 1.0)]).is_err());
}

#[test]
fn unmatched_layers_may_be_skipped() {
    let folder = tempfile::tempdir().unwrap();
    // The layers of the double blocks keep their names, the others get block numbers that the model does not have.
    let partly: Convert = |m, down, up| {
        lora(format!("diffusion_model.{}", m.replace("single_blocks.", "single_blocks.9")), down, up)
    };
    let path = write_converted(folder.path(), "bfl", "partly", partly);
    let mut klein = klein(&LoadOptions::default());
    let without = klein.latents();
    let loras = klein.planned(&[(&path, 1.0)]).unwrap();
    let error = klein.pipeline.set_loras(&loras, false).unwrap_err().to_string();
    assert!(error.contains("`diffusion_model.single_blocks.90.linear1`"), "{error}");
    assert!(klein.latents() == without);
    let report = klein.pipeline.set_loras(&loras, true).unwrap().remove(0);
    assert!(report.matched > 0 && report.matched < report.total, "{report}");
    assert_eq!(report.unmatched.len(), report.total - report.matched);
    let switched = klein.latents();
    assert!(distance(&switched, &without) > 1e-3);
    // The same when loaded with it.
    let options = LoadOptions { lora_partial: true, ..LoadOptions::default() };
    assert!(klein_with(&options, &[(&path, 1.0)]).latents() == switched);
}
