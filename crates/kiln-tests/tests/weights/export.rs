//! What converted files keep: types, codes, scales, metadata.

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::export::{Container, Options, Storage, TensorNames, export};
use kiln_weights::{Component, Error, WeightSource, save};
use tempfile::TempDir;

const OPTIONS: Options = Options {
    component: Component::Transformer,
    container: Container::Safetensors,
    names: TensorNames::Original,
    storage: Storage::Keep,
    threads: 1,
};
const MARK: &str = "single_stream_modulation.linear.weight";

fn tensor(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> HostTensor {
    HostTensor::new(dtype, shape, bytes.into()).unwrap()
}

fn bytes(seed: usize, count: usize, mask: u8) -> Vec<u8> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) >> 3) as u8 & mask).collect()
}

/// q, k and v of a block in nvfp4, in ModelOpt's order, with these scales of the whole.
fn modelopt(dir: &TempDir, globals: [f32; 3]) -> WeightSource {
    const BLOCK: &str = "transformer_blocks.0.attn";
    let (rows, cols) = (130, 80);
    let mut tensors = vec![(MARK.to_owned(), HostTensor::zeros([6, 4]))];
    for (i, (name, global)) in ["to_q", "to_k", "to_v"].into_iter().zip(globals).enumerate() {
        let codes = tensor(DType::U8, &[rows, cols / 2], bytes(i, rows * cols / 2, 0xff));
        // Positive normal numbers of e4m3, away from its ends.
        let scales = bytes(i, rows * cols / 16, 0x2f).into_iter().map(|b| b + 0x10).collect();
        let global = HostTensor::from_f32([0; 0], vec![global]).unwrap();
        tensors.push((format!("{BLOCK}.{name}.weight"), codes));
        tensors.push((
            format!("{BLOCK}.{name}.weight_scale"),
            tensor(DType::F8E4M3, &[rows, cols / 16], scales),
        ));
        tensors.push((format!("{BLOCK}.{name}.weight_scale_2"), global));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    let file = dir.path().join("modelopt.safetensors");
    save::save(&file, &tensors, &Default::default()).unwrap();
    WeightSource::open_component(&file, Component::Transformer).unwrap()
}

fn values(source: &WeightSource) -> Vec<(String, Vec<f32>)> {
    let all = source.names().map(|name| (name, source.tensor(name).unwrap()));
    all.map(|(name, tensor)| (name.to_owned(), tensor.to_f32().unwrap().into_owned())).collect()
}

fn reopened(dir: &TempDir, source: &WeightSource, options: &Options) -> WeightSource {
    let out = dir.path().join("out.safetensors");
    export(source, &out, options, &mut |_, _| Ok(())).unwrap();
    WeightSource::open_component(out, Component::Transformer).unwrap()
}

#[test]
fn nvfp4_in_modelopts_order_becomes_comfyuis_with_the_same_values() {
    let dir = tempfile::tempdir().unwrap();
    let q = "transformer_blocks.0.attn.to_q.weight";
    // One scale for all, and scales that differ by powers of two, which the block scales can take over.
    for globals in [[0.3; 3], [0.3, 0.6, 0.15]] {
        let source = modelopt(&dir, globals);
        for names in [TensorNames::Original, TensorNames::Diffusers] {
            let written = reopened(&dir, &source, &Options { names, ..OPTIONS });
            assert_eq!(written.packed_format(q), Some(Format::NvFp4), "{globals:?} {names:?}");
            assert!(values(&source) == values(&written), "{globals:?} {names:?}");
            assert!(written.metadata()["_quantization_metadata"].contains("nvfp4"));
        }
    }
}

#[test]
fn nvfp4_with_unlike_scales_is_fused_without_loss_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let source = modelopt(&dir, [0.3, 0.31, 0.7]);
    let out = dir.path().join("fused.safetensors");
    let report = export(&source, &out, &OPTIONS, &mut |_, _| Ok(())).unwrap();
    assert_eq!(report.changed.into_iter().collect::<Vec<_>>(), [(("nvfp4", "f32"), 1)]);
    let written = WeightSource::open_component(out, Component::Transformer).unwrap();
    assert!(values(&source) == values(&written));
    // Under diffusers' names they stay apart.
    let apart = reopened(&dir, &source, &Options { names: TensorNames::Diffusers, ..OPTIONS });
    assert_eq!(apart.packed_format("transformer_blocks.0.attn.to_v.weight"), Some(Format::NvFp4));
    assert!(values(&source) == values(&apart));
}

#[test]
fn layers_that_have_the_type_already_are_copied() {
    let dir = tempfile::tempdir().unwrap();
    let source = modelopt(&dir, [0.3; 3]);
    let again = reopened(&dir, &source, &Options { storage: Storage::Quantized(Format::NvFp4), ..OPTIONS });
    assert!(values(&source) == values(&again));
}

#[test]
fn fused_layers_of_unlike_types_keep_every_value() {
    let dir = tempfile::tempdir().unwrap();
    let numbers = |count: usize| (0..count).map(|i| i as f32 / 7.0).collect::<Vec<_>>();
    let floats = || HostTensor::from_f32([2, 4], numbers(8)).unwrap();
    let fp8 = tensor(DType::F8E4M3, &[2, 4], bytes(1, 8, 0x3f));
    let scale = HostTensor::from_f32([0; 0], vec![0.5]).unwrap();
    let tensors = [
        (MARK, HostTensor::zeros([6, 4])),
        ("transformer_blocks.0.attn.to_q.weight", floats().to_dtype(DType::BF16).unwrap()),
        ("transformer_blocks.0.attn.to_k.weight", floats()),
        ("transformer_blocks.0.attn.to_v.weight", tensor(DType::F16, &[2, 4], bytes(2, 16, 0x3b))),
        // A plain cast beside scaled layers.
        ("transformer_blocks.1.attn.to_q.weight", fp8.clone()),
        ("transformer_blocks.1.attn.to_k.weight", fp8.clone()),
        ("transformer_blocks.1.attn.to_k.weight_scale", scale.clone()),
        ("transformer_blocks.1.attn.to_v.weight", fp8),
        ("transformer_blocks.1.attn.to_v.weight_scale", scale),
    ];
    let file = dir.path().join("mixed.safetensors");
    save::save(&file, &tensors, &Default::default()).unwrap();
    let source = WeightSource::open_component(&file, Component::Transformer).unwrap();
    assert!(values(&source) == values(&reopened(&dir, &source, &OPTIONS)));
}

#[test]
fn metadata_that_is_no_longer_true_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.safetensors");
    let text = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let metadata = text(&[
        ("model_index.json", "{}"),
        ("transformer/config.json", "{}"),
        ("_quantization_metadata", r#"{"layers": {}}"#),
        ("kiln.variant", "base"),
        ("author", "someone"),
    ]);
    save::save(&file, &[(MARK, HostTensor::zeros([6, 4]))], &metadata).unwrap();
    let source = WeightSource::open_component(&file, Component::Transformer).unwrap();
    let written = reopened(&dir, &source, &OPTIONS);
    assert_eq!(*written.metadata(), text(&[("kiln.variant", "base"), ("author", "someone")]));
}

#[test]
fn what_cannot_be_written_or_quantized_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let source = modelopt(&dir, [0.3; 3]);
    let error = |component, container, storage| {
        let out = dir.path().join("out.gguf");
        let options = Options { component, container, storage, ..OPTIONS };
        let error = export(&source, &out, &options, &mut |_, _| Ok(())).unwrap_err();
        assert!(!out.exists());
        error.to_string()
    };
    let nvfp4 = Storage::Quantized(Format::NvFp4);
    let message = error(Component::Transformer, Container::Gguf, nvfp4);
    assert!(message.contains("can't hold nvfp4: that requires a safetensors file"), "{message}");
    let message = error(Component::Vae, Container::Safetensors, nvfp4);
    assert!(message.contains("has no layers to quantize"), "{message}");
    let out = dir.path().join("cancelled.safetensors");
    let cancelled = export(&source, &out, &OPTIONS, &mut |_, _| Err(Error::Cancelled));
    assert!(matches!(cancelled, Err(Error::Cancelled)) && !out.exists());
}

/// q, k and v of a block as these tensors.
fn qkv(dir: &TempDir, parts: [HostTensor; 3]) -> WeightSource {
    let names = ["to_q", "to_k", "to_v"].map(|name| format!("transformer_blocks.0.attn.{name}.weight"));
    let mut tensors = vec![(MARK, HostTensor::zeros([6, 4]))];
    tensors.extend(names.iter().map(String::as_str).zip(parts));
    let file = dir.path().join("qkv.safetensors");
    save::save(&file, &tensors, &Default::default()).unwrap();
    WeightSource::open_component(&file, Component::Transformer).unwrap()
}

#[test]
fn parts_in_unlike_types_are_fused_in_the_type_that_has_all_their_values() {
    let dir = TempDir::new().unwrap();
    let values = |seed: usize| (0..8 * 32).map(move |i| ((i * 37 + seed * 11) % 255) as f32 / 64.0 - 2.0);
    let dense = |seed| HostTensor::from_f32([8, 32], values(seed).collect()).unwrap();
    let half = values(2).flat_map(|v| kiln_tensor::f16::from_f32(v).to_le_bytes()).collect();
    let parts = [dense(0), dense(1).to_dtype(DType::BF16).unwrap(), tensor(DType::F16, &[8, 32], half)];
    let expected: Vec<f32> = parts.iter().flat_map(|part| part.to_f32().unwrap().into_owned()).collect();
    let source = qkv(&dir, parts);
    for (container, file) in [(Container::Safetensors, "o.safetensors"), (Container::Gguf, "o.gguf")] {
        let out = dir.path().join(file);
        export(&source, &out, &Options { container, ..OPTIONS }, &mut |_, _| Ok(())).unwrap();
        let raw = WeightSource::open(&out).unwrap();
        let fused = raw.tensor("double_blocks.0.img_attn.qkv.weight").unwrap();
        assert_eq!((fused.dtype(), fused.shape().dims()), (DType::F32, &[24, 32][..]), "{file}");
        assert_eq!(*fused.to_f32().unwrap(), expected, "{file}");
    }
}

#[test]
fn an_f64_value_that_f32_does_not_have_is_refused() {
    let dir = TempDir::new().unwrap();
    let part = |first: f64| {
        let values = std::iter::once(first).chain(std::iter::repeat_n(0.5, 255));
        tensor(DType::F64, &[8, 32], values.flat_map(f64::to_le_bytes).collect())
    };
    let convert =
        |parts| export(&qkv(&dir, parts), &dir.path().join("o.safetensors"), &OPTIONS, &mut |_, _| Ok(()));
    convert([part(1.0), part(-1e38), part(f64::MIN_POSITIVE)]).unwrap();
    let error = convert([part(1.0), part(1e300), part(1.0)]).unwrap_err();
    assert!(
        matches!(&error, Error::InvalidTensor { tensor, .. } if tensor.ends_with("to_k.weight")),
        "{error}"
    );
    assert!(error.to_string().contains("beyond the range of f32"));
}
