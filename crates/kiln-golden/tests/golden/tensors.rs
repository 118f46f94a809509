//! Checkpoints with extra, missing and renamed tensors: every change is in the image, an error, or a note.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{Error, LocalFiles, Model, Plan, Request};
use kiln_golden::{Checkpoint, testdata};
use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};

type Tensors = BTreeMap<String, HostTensor>;

const COMPONENTS: [(&str, &str); 3] = [
    ("transformer", "diffusion_pytorch_model.safetensors"),
    ("text_encoder", "model.safetensors"),
    ("vae", "diffusion_pytorch_model.safetensors"),
];

/// A model folder with one component whose tensors change.
struct Fixture {
    checkpoint: Checkpoint,
    file: PathBuf,
    tensors: Tensors,
}

impl Fixture {
    fn new(component: &str, file: &str) -> Fixture {
        let checkpoint = Checkpoint::assemble(&testdata(), "klein").unwrap();
        let folder = checkpoint.path().join(component);
        let source = WeightSource::open(&folder).unwrap();
        let tensors = source.names().map(|name| (name.to_owned(), source.tensor(name).unwrap())).collect();
        drop(source);
        let files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
        for file in files.iter().filter(|file| !file.ends_with("config.json")) {
            fs::remove_file(file).unwrap();
        }
        Fixture { checkpoint, file: folder.join(file), tensors }
    }

    fn generate(&self, tensors: &Tensors) -> Result<Generated, Error> {
        let list: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
        save::save(&self.file, &list, &Default::default()).unwrap();
        generate(self.checkpoint.path())
    }
}

/// An image and the notes about its model.
struct Generated {
    image: Vec<u8>,
    notes: Vec<String>,
}

fn generate(path: &Path) -> Result<Generated, Error> {
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Arc::new(Model::open(path)?);
    let notes = model.unused_tensor_notes();
    let pipeline = Pipeline::load(backend, &model, &LoadOptions::default(), &mut ())?;
    let request = Request {
        width: Some(64),
        height: Some(64),
        steps: Some(2),
        max_tokens: Some(32),
        seed: vec![3],
        ..Request::new("a red fox")
    };
    let output = pipeline.generate(&Plan::new(&model, &request, &LocalFiles)?, &mut ())?;
    let latents = output[0].latents.to_f32().unwrap();
    let mut image: Vec<u8> = latents.iter().flat_map(|value| value.to_le_bytes()).collect();
    image.extend(output[0].image.pixels());
    Ok(Generated { image, notes })
}

/// Xorshift, for the choice of changes.
struct Choice(u64);

impl Choice {
    fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % count
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// A name that is nearly the given one: another block number, another leaf, another module, a misspelling.
fn similar_name(name: &str, choice: &mut Choice) -> String {
    let mut words: Vec<String> = name.split('.').map(str::to_owned).collect();
    let numbers: Vec<usize> = (0..words.len()).filter(|&i| words[i].parse::<usize>().is_ok()).collect();
    let last = words.len() - 1;
    match choice.below(5) {
        0 if !numbers.is_empty() => {
            let i = *choice.of(&numbers);
            words[i] = (words[i].parse::<usize>().unwrap() + 1 + choice.below(40)).to_string();
        }
        1 => {
            let leaves =
                ["bias", "pre_quant_scale", "smooth", "weight_g", "scale", "lora_A.weight", "zero_point"];
            words[last] = (*choice.of(&leaves)).to_owned();
        }
        2 => words.insert(last, "extra".into()),
        3 => words.insert(0, (*choice.of(&["other", "model", "ema_1"])).to_owned()),
        _ => {
            let word = choice.below(words.len());
            words[word].push('x');
        }
    }
    words.join(".")
}

/// Changes one to three tensors, and says what was done.
fn change(tensors: &Tensors, choice: &mut Choice) -> (Tensors, String) {
    let names: Vec<&String> = tensors.keys().collect();
    let (mut changed, mut what) = (tensors.clone(), Vec::new());
    for _ in 0..=choice.below(3) {
        let name = *choice.of(&names);
        let other = similar_name(name, choice);
        match choice.below(3) {
            0 => {
                changed.remove(name);
                what.push(format!("without {name}"));
            }
            1 => {
                let Some(tensor) = changed.remove(name) else { continue };
                what.push(format!("{name} as {other}"));
                changed.insert(other, tensor);
            }
            _ => {
                let rows = tensors[name].shape().dims().first().copied().unwrap_or(1);
                let values = (0..rows).map(|i| 0.5 + (i % 7) as f32).collect();
                what.push(format!("with {other}"));
                changed.entry(other).or_insert(HostTensor::from_f32([rows], values).unwrap());
            }
        }
    }
    (changed, what.join(", "))
}

#[test]
fn every_changed_set_of_tensors_is_noticed() {
    const CHANGES: usize = 80;
    for (component, file) in COMPONENTS {
        let fixture = Fixture::new(component, file);
        let original = fixture.generate(&fixture.tensors).unwrap();
        assert_eq!(original.notes, [""; 0], "{component}");
        let mut choice = Choice(0x9e37_79b9_7f4a_7c15);
        for _ in 0..CHANGES {
            let (changed, what) = change(&fixture.tensors, &mut choice);
            if changed.keys().eq(fixture.tensors.keys()) {
                continue;
            }
            if let Ok(generated) = fixture.generate(&changed) {
                let noticed = !generated.notes.is_empty() || generated.image != original.image;
                assert!(noticed, "{component}: the image does not change {what}");
            }
        }
    }
}

#[test]
fn a_tensor_that_nobody_reads_is_an_error_that_names_it() {
    let cases = [
        ("transformer", "transformer_blocks.0.attn.to_q.pre_quant_scale"),
        ("transformer", "transformer_blocks.0.attn.norm_q.bias"),
        ("transformer", "single_transformer_blocks.9.attn.norm_q.weight"),
        ("text_encoder", "model.layers.0.self_attn.q_norm.bias"),
        ("text_encoder", "model.layers.99.input_layernorm.weight"),
        ("text_encoder", "other.weight"),
        ("vae", "decoder.conv_in.scale"),
        ("vae", "bn.weight"),
    ];
    for (component, name) in cases {
        let (_, file) = COMPONENTS.iter().find(|(folder, _)| *folder == component).unwrap();
        let fixture = Fixture::new(component, file);
        let mut tensors = fixture.tensors.clone();
        tensors.insert(name.into(), HostTensor::zeros([4]));
        let error = fixture.generate(&tensors).err().unwrap_or_else(|| panic!("{name} was accepted"));
        assert!(format!("{error:?}").contains(name), "{error:?}");
    }
}

#[test]
fn a_gap_in_the_block_numbers_is_an_error() {
    let fixture = Fixture::new("transformer", "diffusion_pytorch_model.safetensors");
    let renamed =
        |name: &String| name.replace("single_transformer_blocks.1.", "single_transformer_blocks.2.");
    let tensors: Tensors = fixture.tensors.iter().map(|(name, t)| (renamed(name), t.clone())).collect();
    assert!(fixture.generate(&tensors).is_err());
    // As a single file, without a config that states the number of blocks.
    let file = fixture.file.with_file_name("klein.safetensors");
    fs::rename(&fixture.file, &file).unwrap();
    let error = Model::open(&file).expect_err("the gap was accepted");
    assert!(error.to_string().contains("single_transformer_blocks.2."), "{error}");
}

#[test]
fn leftovers_of_training_are_noted_and_counters_are_not() {
    let fixture = Fixture::new("vae", "diffusion_pytorch_model.safetensors");
    let mut tensors = fixture.tensors.clone();
    tensors.insert("bn.num_batches_tracked".into(), HostTensor::zeros([1]));
    let original = fixture.generate(&tensors).unwrap();
    assert_eq!(original.notes, [""; 0]);
    tensors.insert("loss.discriminator.main.0.weight".into(), HostTensor::zeros([4]));
    let noted = fixture.generate(&tensors).unwrap();
    assert_eq!((noted.image == original.image, noted.notes.len()), (true, 1));
    assert!(noted.notes[0].contains("loss.discriminator.main.0.weight"), "{:?}", noted.notes);
}

#[test]
fn layers_that_are_not_needed_may_be_missing_whole_but_not_in_part() {
    let fixture = Fixture::new("text_encoder", "model.safetensors");
    let without = |end: &str| -> Tensors {
        let kept = fixture.tensors.iter().filter(|(name, _)| !name.contains(end));
        kept.map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
    };
    assert_eq!(fixture.generate(&without("layers.27.")).unwrap().notes, [""; 0]);
    let noted = fixture.generate(&without("layers.27.mlp.up_proj")).unwrap().notes;
    assert!(noted[0].contains("`model.layers.27.mlp.up_proj.weight`"), "{noted:?}");
}
