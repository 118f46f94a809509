//! Mistral's text encoder in the namings of its files, and converting between them.

use std::collections::BTreeMap;

use crate::common::Random;
use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::export::{Container, Options, Storage, TensorNames, export};
use kiln_weights::{Component, Error, KnownTensors, WeightSource, save};
use tempfile::TempDir;

/// Heads of 16 rows: 6 of q, 3 of k and v.
const HEAD_DIM: usize = 16;
const LAYERS: usize = 2;

type Tensors = Vec<(String, HostTensor)>;

/// A language model with its head, and a vision tower, under the model's names.
fn mistral() -> Tensors {
    let mut random = Random(7);
    let mut matrix = |rows: usize, cols: usize| {
        let values = (0..rows * cols).map(|_| random.below(512) as f32 / 256.0 - 1.0).collect();
        HostTensor::from_f32([rows, cols], values).unwrap().to_dtype(DType::BF16).unwrap()
    };
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), matrix(40, 32)),
        ("lm_head.weight".to_owned(), matrix(40, 32)),
        ("vision_tower.transformer.layers.0.attention.q_proj.weight".to_owned(), matrix(16, 16)),
        ("multi_modal_projector.linear_1.weight".to_owned(), matrix(32, 16)),
    ];
    for i in 0..LAYERS {
        let shapes = [
            ("self_attn.q_proj", [96, 32]),
            ("self_attn.k_proj", [48, 32]),
            ("self_attn.v_proj", [48, 32]),
            ("self_attn.o_proj", [32, 96]),
            ("mlp.gate_proj", [160, 32]),
            ("mlp.up_proj", [160, 32]),
            ("mlp.down_proj", [32, 160]),
        ];
        tensors.extend(
            shapes
                .map(|(name, [rows, cols])| (format!("model.layers.{i}.{name}.weight"), matrix(rows, cols))),
        );
    }
    let vector = || HostTensor::from_f32([32], (0..32).map(|i| i as f32 / 32.0).collect()).unwrap();
    let norms = (0..LAYERS).flat_map(|i| {
        ["input_layernorm", "post_attention_layernorm"].map(|name| format!("model.layers.{i}.{name}.weight"))
    });
    let norms: Vec<String> = norms.chain(["model.norm.weight".to_owned()]).collect();
    tensors.extend(norms.into_iter().map(|name| (name, vector())));
    tensors
}

fn open(dir: &TempDir, tensors: &Tensors, rename: impl Fn(&str) -> String) -> WeightSource {
    let file = dir.path().join("mistral.safetensors");
    let named: Vec<(String, HostTensor)> =
        tensors.iter().map(|(name, t)| (rename(name), t.clone())).collect();
    let named: Vec<(&str, HostTensor)> = named.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    save::save(&file, &named, &BTreeMap::new()).unwrap();
    WeightSource::open_component(&file, Component::TextEncoder).unwrap()
}

fn values(source: &WeightSource) -> BTreeMap<String, Vec<f32>> {
    let value = |name: &str| source.tensor(name).unwrap().to_f32().unwrap().into_owned();
    source.names().map(|name| (name.to_owned(), value(name))).collect()
}

fn options(container: Container, names: TensorNames, storage: Storage) -> Options {
    Options { component: Component::TextEncoder, container, names, storage, threads: 1 }
}

fn reopened(dir: &TempDir, source: &WeightSource, options: Options) -> WeightSource {
    let extension = if options.container == Container::Gguf { "gguf" } else { "safetensors" };
    let out = dir.path().join(format!("out.{extension}"));
    export(source, &out, &options, &mut |_, _| Ok(())).unwrap();
    let bytes = std::fs::read(&out).unwrap();
    WeightSource::from_bytes(out, bytes).unwrap().component(Component::TextEncoder).unwrap().unwrap()
}

/// The row of a head that llama.cpp's converter puts first, second, … of 16.
const INTERLEAVED: [usize; HEAD_DIM] = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15];

#[test]
fn every_naming_gives_the_same_tensors() {
    let (dir, tensors) = (tempfile::tempdir().unwrap(), mistral());
    let plain = values(&open(&dir, &tensors, str::to_owned));
    let transformers_4 = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("language_model.model.{rest}"),
        None if name.starts_with("lm_head") => format!("language_model.{name}"),
        None => name.to_owned(),
    };
    let transformers_5 = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None if name.starts_with("lm_head") => name.to_owned(),
        None => format!("model.{name}"),
    };
    let in_checkpoint = |name: &str| format!("text_encoders.mistral3_24b.transformer.{name}");
    for naming in ["4", "5", "checkpoint"] {
        let source = open(&dir, &tensors, |name| match naming {
            "4" => transformers_4(name),
            "5" => transformers_5(name),
            _ => in_checkpoint(name),
        });
        assert!(values(&source) == plain, "{naming}");
        assert!(!source.has_interleaved_rotary() && source.head_dim() == Some(HEAD_DIM), "{naming}");
    }
    let bare: Tensors = tensors.into_iter().filter(|(name, _)| name.starts_with("model.")).collect();
    let source = open(&dir, &bare, |name| name.trim_start_matches("model.").to_owned());
    assert!(values(&source).iter().all(|(name, values)| plain[name] == *values));
}

#[test]
fn what_is_beside_the_layers_needs_no_reader_and_leaves_the_fingerprint_alone() {
    let (dir, tensors) = (tempfile::tempdir().unwrap(), mistral());
    let source = open(&dir, &tensors, str::to_owned);
    let mut known = KnownTensors::default();
    for (name, tensor) in tensors.iter().filter(|(name, _)| name.starts_with("model.")) {
        known.add(name.clone(), tensor.shape().clone());
    }
    assert_eq!(source.check_tensors(Component::TextEncoder, &known).unwrap(), None);
    let alone: Tensors = tensors.iter().filter(|(name, _)| name.starts_with("model.")).cloned().collect();
    let fingerprint = source.fingerprint().unwrap();
    // Windows replaces no file that is mapped.
    drop(source);
    assert_eq!(open(&dir, &alone, str::to_owned).fingerprint().unwrap(), fingerprint);
    let mut strange = tensors;
    strange.push(("model.layers.0.self_attn.sinks".into(), HostTensor::zeros([6])));
    let error = open(&dir, &strange, str::to_owned).check_tensors(Component::TextEncoder, &known);
    assert!(matches!(error, Err(Error::UnusedTensors { names, .. }) if names.len() == 1));
}

#[test]
fn a_gguf_has_llama_cpps_order_of_rows_and_comes_back() {
    let (dir, tensors) = (tempfile::tempdir().unwrap(), mistral());
    let source = open(&dir, &tensors, str::to_owned);
    let original = values(&source);
    let gguf =
        reopened(&dir, &source, options(Container::Gguf, TensorNames::Original, Storage::Dense(DType::F32)));
    assert_eq!(gguf.metadata()["general.architecture"], "llama");
    assert_eq!(
        (gguf.metadata()["head_dim"].as_str(), gguf.metadata()["rope_theta"].as_str()),
        ("16", "1000000000")
    );
    assert!(gguf.has_interleaved_rotary() && gguf.head_dim() == Some(HEAD_DIM));
    assert!(!gguf.names().any(|name| name.contains("vision") || name.contains("projector")));
    let written = values(&gguf);
    for (name, rows) in
        [("model.layers.1.self_attn.q_proj.weight", 96), ("model.layers.0.self_attn.k_proj.weight", 48)]
    {
        for row in 0..rows {
            let from = row / HEAD_DIM * HEAD_DIM + INTERLEAVED[row % HEAD_DIM];
            assert_eq!(written[name][row * 32..][..32], original[name][from * 32..][..32], "{name} {row}");
        }
    }
    let name = "model.layers.0.self_attn.v_proj.weight";
    assert_eq!(written[name], original[name]);

    // Back to transformers' order, and from GGUF to GGUF without a change.
    let back = reopened(&dir, &gguf, options(Container::Safetensors, TensorNames::Diffusers, Storage::Keep));
    assert!(!back.has_interleaved_rotary());
    assert!(values(&back).iter().all(|(name, values)| original[name] == *values));
    let again = reopened(&dir, &gguf, options(Container::Gguf, TensorNames::Original, Storage::Keep));
    assert!(values(&again) == written);
}

#[test]
fn quantized_rows_are_reordered_with_their_scales() {
    let (dir, tensors) = (tempfile::tempdir().unwrap(), mistral());
    let source = open(&dir, &tensors, str::to_owned);
    let quantized = |format, container| {
        reopened(&dir, &source, options(container, TensorNames::Original, Storage::Quantized(format)))
    };
    for (format, container) in [
        (Format::Q8_0, Container::Gguf),
        (Format::Q4_0, Container::Gguf),
        (Format::F8E4M3, Container::Safetensors),
        (Format::NvFp4, Container::Safetensors),
    ] {
        let permuted = quantized(format, container);
        assert!(permuted.has_interleaved_rotary());
        let plain =
            reopened(&dir, &source, options(container, TensorNames::Diffusers, Storage::Quantized(format)));
        assert!(!plain.has_interleaved_rotary());
        let (permuted, plain) = (values(&permuted), values(&plain));
        let name = "model.layers.0.self_attn.q_proj.weight";
        for row in 0..96 {
            let from = row / HEAD_DIM * HEAD_DIM + INTERLEAVED[row % HEAD_DIM];
            assert_eq!(permuted[name][row * 32..][..32], plain[name][from * 32..][..32], "{format} {row}");
        }
    }
    // Stored codes are moved, not quantized again.
    let fp8 = quantized(Format::F8E4M3, Container::Safetensors);
    let back = reopened(&dir, &fp8, options(Container::Safetensors, TensorNames::Diffusers, Storage::Keep));
    assert_eq!(back.storage_name("model.layers.0.self_attn.q_proj.weight"), Some("f8_e4m3"));
    let once = reopened(
        &dir,
        &source,
        options(Container::Safetensors, TensorNames::Diffusers, Storage::Quantized(Format::F8E4M3)),
    );
    assert!(values(&back) == values(&once));
}

#[test]
fn rows_that_are_no_heads_are_an_error() {
    let (dir, tensors) = (tempfile::tempdir().unwrap(), mistral());
    let source = open(&dir, &tensors, str::to_owned).with_metadata([("head_dim".into(), "20".into())]);
    let gguf = options(Container::Gguf, TensorNames::Original, Storage::Keep);
    let error = export(&source, &dir.path().join("a.gguf"), &gguf, &mut |_, _| Ok(())).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("_proj.weight") && message.contains("heads of 20 rows"), "{message}");
}

/// ComfyUI's mark of a quantized layer.
fn mark(module: &str, format: &str) -> (String, HostTensor) {
    let text = format!("{{\"format\": \"{format}\"}}").into_bytes();
    let shape = [text.len()];
    (format!("{module}.comfy_quant"), HostTensor::new(DType::U8, shape, text.into()).unwrap())
}

#[test]
fn nvfp4_and_fp8_layers_with_comfyuis_marks_are_read_together() {
    let dir = tempfile::tempdir().unwrap();
    let (mut mixed, mut expected) = (Tensors::new(), BTreeMap::new());
    let scalar = |value: f32| HostTensor::from_f32([0; 0], vec![value]).unwrap();
    for (name, tensor) in mistral() {
        let module = name.trim_end_matches(".weight").to_owned();
        let &[rows, cols] = tensor.shape().dims() else {
            mixed.push((name, tensor));
            continue;
        };
        let is_layer = name.starts_with("model.layers.") || name.starts_with("lm_head");
        if !is_layer {
            mixed.push((name, tensor));
        } else if name.contains("v_proj") {
            // 1.5 in e4m3.
            let codes = HostTensor::new(DType::F8E4M3, [rows, cols], vec![0x3c; rows * cols].into()).unwrap();
            mixed.extend([(name.clone(), codes), (format!("{module}.weight_scale"), scalar(0.5))]);
            mixed.push(mark(&module, "float8_e4m3fn"));
            expected.insert(name, vec![0.75; rows * cols]);
        } else {
            // 1 and -1 in e2m1, the first of a pair in the high half; scales of 2, in tiles of 128 × 4.
            let pairs = |i: usize| if i.is_multiple_of(3) { 0x2a } else { 0xa2 };
            let codes: Vec<u8> = (0..rows * cols / 2).map(pairs).collect();
            let values = codes.iter().flat_map(|pair| if *pair == 0x2a { [0.5, -0.5] } else { [-0.5, 0.5] });
            expected.insert(name.clone(), values.collect::<Vec<f32>>());
            let scales = [rows.next_multiple_of(128), (cols / 16).next_multiple_of(4)];
            let bytes = vec![0x40; scales[0] * scales[1]];
            mixed.push((name, HostTensor::new(DType::U8, [rows, cols / 2], codes.into()).unwrap()));
            let scales = HostTensor::new(DType::F8E4M3, scales, bytes.into()).unwrap();
            mixed.push((format!("{module}.weight_scale"), scales));
            mixed.push((format!("{module}.weight_scale_2"), scalar(0.25)));
            mixed.push(mark(&module, "nvfp4"));
        }
    }
    let source = open(&dir, &mixed, str::to_owned);
    assert_eq!(source.storage_name("model.layers.1.self_attn.v_proj.weight"), Some("f8_e4m3"));
    assert_eq!(source.storage_name("lm_head.weight"), Some("nvfp4"));
    let found = values(&source);
    assert!(expected.iter().all(|(name, values)| found[name] == *values));
    assert_eq!(found.len(), mistral().len(), "scales and marks are no tensors of the model");
    // Without its scale of the whole, a layer is an error with its name.
    mixed.retain(|(name, _)| name != "model.layers.0.mlp.up_proj.weight_scale_2");
    let named: Vec<(&str, HostTensor)> = mixed.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    let file = dir.path().join("broken.safetensors");
    save::save(&file, &named, &BTreeMap::new()).unwrap();
    let error = WeightSource::open(&file).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.mlp.up_proj") && error.contains("weight_scale_2"), "{error}");
}
