//! Which file of a folder is read, and sharded weights.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::tensors;
use kiln_weights::WeightSource;
use tempfile::TempDir;

fn folder(files: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in files {
        // Each file holds one tensor with the file's name, to tell which was read.
        fs::write(dir.path().join(name), tensors(&[(name, &[1])], &[])).unwrap();
    }
    dir
}

fn opened(dir: &TempDir) -> String {
    let source = WeightSource::open(dir.path()).unwrap();
    assert_eq!(source.path(), dir.path());
    source.names().collect::<Vec<_>>().join(" ")
}

/// The error, with `DIR` for the folder's random name.
fn open_error(dir: &TempDir) -> String {
    let message = WeightSource::open(dir.path()).unwrap_err().to_string();
    message.replace(dir.path().to_str().unwrap(), "DIR").replace('\\', "/")
}

/// Two shards and their index.
fn sharded() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let shard = |i, names: &[(&str, &[usize])]| {
        fs::write(dir.path().join(shard_name(i)), tensors(names, &[("format", "pt")])).unwrap();
    };
    shard(1, &[("layers.0.weight", &[2, 2]), ("embed.weight", &[4, 2])]);
    shard(2, &[("layers.1.weight", &[2, 2]), ("norm.weight", &[2])]);
    index(&dir, &[("embed.weight", 1), ("layers.0.weight", 1), ("layers.1.weight", 2), ("norm.weight", 2)]);
    dir
}

fn shard_name(i: usize) -> String {
    format!("model-0000{i}-of-00002.safetensors")
}

fn index(dir: &TempDir, names: &[(&str, usize)]) -> PathBuf {
    let map: serde_json::Map<_, _> =
        names.iter().map(|(n, i)| (n.to_string(), shard_name(*i).into())).collect();
    let path = dir.path().join("model.safetensors.index.json");
    fs::write(&path, serde_json::json!({ "metadata": { "total_size": 64 }, "weight_map": map }).to_string())
        .unwrap();
    path
}

#[test]
fn a_single_file_is_read_whatever_its_name() {
    assert_eq!(opened(&folder(&["flux-v1.1.safetensors"])), "flux-v1.1.safetensors");
    assert_eq!(opened(&folder(&["model.fp16.safetensors"])), "model.fp16.safetensors");
}

#[test]
fn usual_name_comes_before_others() {
    assert_eq!(opened(&folder(&["a.safetensors", "model.safetensors"])), "model.safetensors");
    let all = ["model.safetensors", "diffusion_pytorch_model.safetensors", "z.safetensors"];
    assert_eq!(opened(&folder(&all)), "diffusion_pytorch_model.safetensors");
}

#[test]
fn plain_file_comes_before_its_variants() {
    assert_eq!(
        opened(&folder(&["a.fp16.safetensors", "a.safetensors", "model.bf16.safetensors"])),
        "a.safetensors"
    );
}

#[test]
fn several_equally_good_files_are_an_error() {
    assert_eq!(
        open_error(&folder(&["b.safetensors", "a.safetensors", "a.fp16.safetensors"])),
        "several weights in folder `DIR`: `a.safetensors`, `b.safetensors`; name the file instead"
    );
    assert_eq!(
        open_error(&folder(&["model.fp16.safetensors", "model.bf16.safetensors"])),
        "several weights in folder `DIR`: `model.bf16.safetensors`, `model.fp16.safetensors`; name the file instead"
    );
}

#[test]
fn error_for_a_folder_without_weights_says_what_it_has() {
    let found = |files: &[&str]| open_error(&folder(files)).replace("no weights in folder `DIR`: ", "");
    assert_eq!(found(&[]), "it is empty");
    assert_eq!(found(&["config.json", "a.txt"]), "found a.txt, config.json");
    assert_eq!(
        found(&["model.bin"]),
        "found only PyTorch pickles, which Kiln does not read; get the safetensors version"
    );
    assert_eq!(
        found(&["model-00001-of-00002.safetensors"]),
        "there are shards, but not the `*.safetensors.index.json` that lists them"
    );
    assert_eq!(
        found(&["model_index.json"]),
        "this is a whole pipeline; its weights are in the folders beside model_index.json"
    );
}

#[test]
fn shards_are_read_as_one() {
    let dir = sharded();
    let source = WeightSource::open(dir.path()).unwrap();
    let names: Vec<_> = source.names().collect();
    assert_eq!(names, ["embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight"]);
    assert_eq!(source.files().count(), 2);
    assert_eq!((source.parameters(), source.bytes()), (18, 72));
    assert_eq!(source.tensor("layers.0.weight").unwrap().to_f32().unwrap().as_ref(), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(source.tensor("norm.weight").unwrap().to_f32().unwrap().as_ref(), [4.0, 5.0]);
    assert_eq!(source.metadata()["format"], "pt");
    let e = source.root().tensor("norm.weight", [3]).unwrap_err().to_string();
    assert!(e.contains("model-00002-of-00002.safetensors"), "an error names the shard: {e}");
}

#[test]
fn index_can_be_opened_itself() {
    let path = sharded();
    assert_eq!(
        WeightSource::open(path.path().join("model.safetensors.index.json")).unwrap().names().count(),
        4
    );
}

#[test]
fn transformers_reads_a_single_file_before_its_index_and_diffusers_the_index() {
    let whole = |dir: &TempDir, name: &str| {
        fs::write(dir.path().join(name), tensors(&[("other", &[1])], &[])).unwrap();
    };
    let names = |dir: &TempDir| WeightSource::open(dir.path()).unwrap().names().count();
    let transformers = sharded();
    whole(&transformers, "model.safetensors");
    assert_eq!(opened(&transformers), "other");
    // A variant is not what transformers looks for.
    let variant = sharded();
    whole(&variant, "model.fp16.safetensors");
    assert_eq!(names(&variant), 4);
    let diffusers = sharded();
    let [from, to] = ["model", "diffusion_pytorch_model"]
        .map(|stem| diffusers.path().join(format!("{stem}.safetensors.index.json")));
    fs::rename(from, to).unwrap();
    whole(&diffusers, "diffusion_pytorch_model.safetensors");
    assert_eq!(names(&diffusers), 4);
    // A list of shards with another name is of neither.
    let other = sharded();
    fs::rename(
        other.path().join("model.safetensors.index.json"),
        other.path().join("flux.safetensors.index.json"),
    )
    .unwrap();
    whole(&other, "model.safetensors");
    assert_eq!(opened(&other), "other");
}

#[test]
fn missing_shard_is_named() {
    let dir = sharded();
    fs::remove_file(dir.path().join(shard_name(2))).unwrap();
    assert_eq!(
        open_error(&dir),
        "`DIR/model.safetensors.index.json` names shards that are missing beside it: \
         `model-00002-of-00002.safetensors`; the download is not complete"
    );
}

#[test]
fn tensor_that_its_shard_does_not_have_is_named() {
    let dir = sharded();
    index(&dir, &[("embed.weight", 1), ("layers.1.weight", 1), ("norm.weight", 2)]);
    assert_eq!(
        open_error(&dir),
        "`DIR/model.safetensors.index.json` places tensor `layers.1.weight` in \
         `model-00001-of-00002.safetensors`, which does not have it"
    );
}

#[test]
fn tensor_in_two_shards_is_an_error() {
    let dir = sharded();
    let twice = tensors(&[("layers.1.weight", &[2, 2]), ("norm.weight", &[2]), ("embed.weight", &[1])], &[]);
    fs::write(dir.path().join(shard_name(2)), twice).unwrap();
    assert_eq!(
        open_error(&dir),
        "tensor `embed.weight` is both in `DIR/model-00001-of-00002.safetensors` and in \
         `DIR/model-00002-of-00002.safetensors`"
    );
}

#[test]
fn truncated_shard_is_named() {
    let dir = sharded();
    let path = dir.path().join(shard_name(1));
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert!(
        open_error(&dir)
            .starts_with("`DIR/model-00001-of-00002.safetensors` is not a valid safetensors file: ")
    );
}

#[test]
fn invalid_index_is_an_error() {
    let dir = sharded();
    let path = dir.path().join("model.safetensors.index.json");
    for (text, expected) in [
        ("{", "EOF while parsing"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":{}}"#, "its `weight_map` names no tensor"),
        (r#"{"weight_map":{"a":7}}"#, "invalid type"),
        (r#"{"weight_map":{"a":"../a.safetensors"}}"#, "shard `../a.safetensors` is not a plain file name"),
        (r#"{"weight_map":{"a":"/etc/a.safetensors"}}"#, "is not a plain file name"),
        (r#"{"weight_map":{"a":".."}}"#, "is not a plain file name"),
        (r#"{"weight_map":{"a":""}}"#, "is not a plain file name"),
    ] {
        fs::write(&path, text).unwrap();
        let message = open_error(&dir);
        let start = "`DIR/model.safetensors.index.json` is not a valid list of shards: ";
        assert!(message.starts_with(start) && message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn folder_in_place_of_a_shard_is_an_error() {
    let dir = sharded();
    let path = dir.path().join(shard_name(2));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(open_error(&dir), "`DIR/model-00002-of-00002.safetensors` is not a regular file");
    assert!(Path::new(&path).is_dir());
}
