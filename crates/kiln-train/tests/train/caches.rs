//! The keys of cached latents and captions change with everything that decides the values.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kiln_engine::Model;
use kiln_golden::{Checkpoint, testdata};
use kiln_tensor::DType;
use kiln_train::dataset::{ImageSize, ImageUse};
use kiln_train::{Cache, Encoders, Key};
use serde_json::Value;

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &target) } else { _ = fs::copy(&path, &target).unwrap() }
    }
}

fn edit(path: &Path, change: impl Fn(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

#[test]
fn keys_follow_the_encoders_files_settings_and_tokenizer() {
    let checkpoint = Checkpoint::assemble(&testdata(), "klein").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join("model").join(name);
    copy(checkpoint.path(), &folder.path().join("model"));
    let keys = || -> (Key, Key) {
        let model = Model::open(folder.path().join("model")).unwrap();
        let cache = Cache::new(folder.path().join("cache"));
        let encoders = Encoders::new(&model, "cpu", DType::F32, &cache).unwrap();
        let size = ImageSize::Reference(64);
        let image = ImageUse { path: "a.png".into(), hash: "aa".into(), size };
        (encoders.text_key("a fox").unwrap(), encoders.image_key(&image, false))
    };
    let (first_text, first_image) = keys();
    assert_eq!(keys(), (first_text.clone(), first_image.clone()));
    let (mut texts, mut images) = (BTreeSet::from([first_text]), BTreeSet::from([first_image]));
    let mut changed = |what: &str, is_text: bool| {
        let (text, image) = keys();
        assert_eq!(texts.insert(text), is_text, "{what}");
        assert_eq!(images.insert(image), !is_text, "{what}");
    };
    edit(&path("text_encoder/config.json"), |config| config["rope_theta"] = 10_000.into());
    changed("rope_theta", true);
    // The same words, other tokens.
    edit(&path("tokenizer/tokenizer_config.json"), |config| {
        config["chat_template"] = "{{ messages[0].content }}".into();
    });
    changed("chat_template", true);
    edit(&path("vae/config.json"), |config| config["batch_norm_eps"] = 0.01.into());
    changed("batch_norm_eps", false);
    // One bit of the last tensor's middle.
    for (file, is_text) in [
        ("text_encoder/model-00001-of-00002.safetensors", true),
        ("vae/diffusion_pytorch_model.safetensors", false),
    ] {
        let mut bytes = fs::read(path(file)).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let middle = (header + bytes.len()) / 2;
        bytes[middle] ^= 1;
        fs::remove_file(path(file)).unwrap();
        fs::write(path(file), bytes).unwrap();
        changed(file, is_text);
    }
}
