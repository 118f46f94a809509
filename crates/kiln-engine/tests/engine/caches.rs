//! What is kept between requests and processes is used only for the inputs it was made from.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{
    Event, FileRef, GeneratedImage, LocalFiles, LoraRef, Model, Plan, Request, Session, TextCache,
};
use kiln_golden::{Checkpoint, testdata};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{WeightSource, save};
use tempfile::TempDir;

use crate::recording_sink::{RecordingSink, SinkCall, request, settings, tiny};

/// Generates an image, and counts these events.
fn generate(
    session: &Session,
    model: &Arc<Model>,
    request: &Request,
    counted: fn(&Event) -> bool,
) -> (GeneratedImage, usize) {
    let plan = Arc::new(Plan::new(model, request, &LocalFiles).unwrap());
    let sink = Arc::<RecordingSink>::default();
    session.generate(&[sink.task(&plan)]);
    session.finish();
    let count = sink.count(|call| matches!(call, SinkCall::Event(event) if counted(event)));
    let mut images = sink.images();
    assert_eq!(images.len(), 1);
    (images.remove(0), count)
}

/// Writes a file as a download would: a new one takes the name.
fn replace(path: &Path, tensors: &[(String, HostTensor)]) {
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    let new = path.with_extension("new");
    save::save(&new, &tensors, &BTreeMap::new()).unwrap();
    fs::rename(new, path).unwrap();
}

/// A copy of tiny klein whose text encoder is one f32 file, so that its embedding is larger than what a fingerprint reads.
struct Klein {
    folder: TempDir,
    _checkpoint: Checkpoint,
}

impl Klein {
    fn new() -> Klein {
        let checkpoint = Checkpoint::assemble(&testdata(), "klein").unwrap();
        let folder = tempfile::tempdir().unwrap();
        for part in ["transformer", "vae", "scheduler", "tokenizer", "text_encoder"] {
            fs::create_dir(folder.path().join(part)).unwrap();
            for entry in fs::read_dir(checkpoint.path().join(part)).unwrap() {
                let path = entry.unwrap().path();
                let is_encoder = part == "text_encoder" && !path.ends_with("config.json");
                if !is_encoder {
                    fs::copy(&path, folder.path().join(part).join(path.file_name().unwrap())).unwrap();
                }
            }
        }
        let index = "model_index.json";
        fs::copy(checkpoint.path().join(index), folder.path().join(index)).unwrap();
        let klein = Klein { folder, _checkpoint: checkpoint };
        klein.write_encoder(|_| {});
        klein
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the encoder's weights with a changed embedding.
    fn write_encoder(&self, change: impl Fn(&mut [f32])) {
        let source = WeightSource::open(testdata().join("tiny/klein/text_encoder")).unwrap();
        let tensor = |name: &str| {
            let tensor = source.tensor(name).unwrap();
            let mut values = tensor.to_f32().unwrap().into_owned();
            if name.ends_with("embed_tokens.weight") {
                change(&mut values);
            }
            (name.to_owned(), HostTensor::from_f32(tensor.shape(), values).unwrap())
        };
        let tensors: Vec<_> = source.names().map(tensor).collect();
        replace(&self.path("text_encoder/model.safetensors"), &tensors);
    }

    fn set_config(&self, key: &str, value: serde_json::Value) {
        let path = self.path("text_encoder/config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(path, config.to_string()).unwrap();
    }

    fn fingerprint(&self) -> String {
        WeightSource::open(self.path("text_encoder")).unwrap().fingerprint().unwrap()
    }

    /// Generates an image as a new process would, with the cache in this folder.
    fn image(&self, cache: Option<&Path>) -> (GeneratedImage, bool) {
        let settings = kiln_engine::Settings { text_cache: cache.map(TextCache::new), ..settings() };
        let model = Arc::new(Model::open(self.folder.path()).unwrap());
        let encoded = |event: &Event| matches!(event, Event::TextLayer { .. });
        let (image, count) = generate(&Session::new(settings, 1), &model, &request("a cat", 1), encoded);
        (image, count > 0)
    }
}

#[test]
fn the_text_cache_follows_everything_that_decides_the_text() {
    let (klein, cache) = (Klein::new(), tempfile::tempdir().unwrap());
    let mut seen: Vec<GeneratedImage> = Vec::new();
    let mut check = |what: &str| {
        let expected = klein.image(None).0;
        let (first, encoded) = klein.image(Some(cache.path()));
        assert!(encoded, "{what}: another encoder's text was used");
        assert!(first.latents == expected.latents, "{what}");
        // The second process finds the text.
        let (second, encoded) = klein.image(Some(cache.path()));
        assert!(!encoded && second.latents == expected.latents, "{what}");
        assert!(seen.iter().all(|image| image.latents != expected.latents), "{what} changes nothing");
        seen.push(expected);
    };
    check("the model itself");
    klein.set_config("rope_theta", 10_000.into());
    check("another rope_theta");
    klein.set_config("rms_norm_eps", 0.01.into());
    check("another rms_norm_eps");
    let before = klein.fingerprint();
    // The row of `a`, which a fingerprint does not read.
    klein.write_encoder(|embedding| embedding[64 * 16..65 * 16].iter_mut().for_each(|v| *v = 1.5));
    assert_eq!(klein.fingerprint(), before);
    check("a changed row of the embedding");
    // A file of the same size, time and sampled bytes.
    let path = klein.path("text_encoder/model.safetensors");
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    klein.write_encoder(|embedding| embedding[64 * 16..65 * 16].iter_mut().for_each(|v| *v = -1.5));
    fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
    check("a damaged download that was replaced");
}

#[test]
fn a_lora_that_is_replaced_while_the_model_is_loaded_is_read_again() {
    let (klein, folder) = (tiny("klein"), tempfile::tempdir().unwrap());
    let path = folder.path().join("ink.safetensors");
    const MODULE: &str = "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj";
    let write = |value: f32| {
        let mut up = vec![0.01f32; 1152 * 4];
        // Bytes that a fingerprint does not read.
        up[2300..2380].fill(value);
        let tensors = [
            (format!("{MODULE}.lora_A.weight"), HostTensor::from_f32([4, 128], vec![0.02; 512]).unwrap()),
            (format!("{MODULE}.lora_B.weight"), HostTensor::from_f32([1152, 4], up).unwrap()),
        ];
        replace(&path, &tensors);
    };
    let lora = LoraRef { path: path.clone(), weight: 1.0, sha256: None };
    let request = Request { loras: vec![lora], ..request("a cat", 1) };
    let session = Session::new(settings(), 1);
    let generate =
        || generate(&session, &klein.model, &request, |event| matches!(event, Event::LoraApplied { .. }));
    write(3.0);
    let (first, applied) = generate();
    let (same, again) = generate();
    assert!(same.latents == first.latents && (applied, again) == (1, 0), "it is not applied again");
    let fingerprint = |image: &GeneratedImage| image.recipe.request.loras[0].sha256.clone().unwrap();
    write(-3.0);
    let (second, _) = generate();
    assert_eq!(fingerprint(&first), fingerprint(&second));
    assert!(second.latents != first.latents, "the old LoRA was used");
}

#[test]
fn a_vae_that_is_replaced_while_the_model_is_loaded_is_read_again() {
    let (klein, folder) = (tiny("klein"), tempfile::tempdir().unwrap());
    let path = folder.path().join("other.safetensors");
    let source = WeightSource::open(testdata().join("tiny/klein/vae")).unwrap();
    let write = |bias: f32| {
        let tensor = |name: &str| {
            let mut tensor = source.tensor(name).unwrap();
            if name == "decoder.conv_out.bias" {
                let values = vec![bias; tensor.numel()];
                tensor = HostTensor::from_f32(tensor.shape(), values).unwrap().to_dtype(DType::F32).unwrap();
            }
            (name.to_owned(), tensor)
        };
        let tensors: Vec<_> = source.names().map(tensor).collect();
        replace(&path, &tensors);
    };
    let request = Request { vae: Some(FileRef::from(path.clone())), ..request("a cat", 1) };
    let session = Session::new(settings(), 1);
    write(-0.5);
    let (first, _) = generate(&session, &klein.model, &request, |_| false);
    write(0.5);
    let (second, _) = generate(&session, &klein.model, &request, |_| false);
    assert!(first.latents == second.latents && first.image != second.image, "the old autoencoder was used");
}
