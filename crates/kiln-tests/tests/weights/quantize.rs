//! Quantizing files to int8, and loading linear layers in int8.

use std::collections::BTreeMap;

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostLinear, HostTensor, LinearWeight};
use kiln_weights::quantize::quantize;
use kiln_weights::{Error, LinearPrecision, WeightSource, save};
use tempfile::TempDir;

const BLOCK: &str = "single_transformer_blocks.0.attn.to_out";

fn values<const N: usize>(seed: usize, shape: [usize; N]) -> HostTensor {
    let numbers = (0..shape.iter().product()).map(|i: usize| ((i + seed) * 7919 % 2001) as f32 * 1e-3 - 1.0);
    HostTensor::from_f32(shape, numbers.collect()).unwrap().to_dtype(DType::BF16).unwrap()
}

/// A folder with a small transformer: three layers in blocks, one outside, a norm.
fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [
        ("transformer_blocks.0.attn.to_q.weight", values(1, [6, 10])),
        ("transformer_blocks.1.attn.to_q.weight", values(2, [6, 10])),
        ("single_transformer_blocks.0.attn.to_out.weight", values(3, [5, 7])),
        ("single_transformer_blocks.0.attn.norm_q.weight", values(4, [7])),
        ("proj_out.weight", values(5, [4, 6])),
    ];
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save::save(dir.path().join("model.safetensors"), &tensors, &metadata).unwrap();
    dir
}

fn quantized(dir: &TempDir) -> WeightSource {
    let out = dir.path().join("out.safetensors");
    quantize(&WeightSource::open(dir.path().join("model.safetensors")).unwrap(), &out, 2, &mut |_, _| Ok(()))
        .unwrap();
    WeightSource::open(out).unwrap()
}

#[test]
fn layers_of_blocks_are_quantized_and_the_rest_is_copied() {
    let dir = folder();
    let source = WeightSource::open(dir.path()).unwrap();
    let (out, mut progress) = (dir.path().join("out.safetensors"), Vec::new());
    let report = quantize(&source, &out, 2, &mut |done, total| {
        progress.push((done, total));
        Ok(())
    })
    .unwrap();
    assert_eq!((progress.first(), progress.last(), progress.len()), (Some(&(1, 8)), Some(&(8, 8)), 8));
    let kinds: Vec<_> = report.groups.iter().map(|g| (g.name.as_str(), g.layers, g.weights)).collect();
    let expected =
        [("single_transformer_blocks.attn.to_out", 1, 35), ("transformer_blocks.attn.to_q", 2, 120)];
    assert_eq!((kinds, report.copied), (expected.to_vec(), 2));
    assert!(report.groups.iter().all(|g| (1e-4..1e-2).contains(&g.error)), "{report}");

    let small = WeightSource::open(&out).unwrap();
    assert_eq!(report.bytes, [source.bytes(), small.bytes()]);
    assert_eq!([source.int8_bytes_to_quantize(), source.int8_bytes()], [155, 155]);
    assert_eq!([small.int8_bytes_to_quantize(), small.int8_bytes()], [0, 155]);
    assert_eq!(small.metadata()["format"], "pt");
    let entry = |name: &str| small.entry(name).map(|(dtype, shape)| (dtype, shape.dims().to_vec()));
    assert_eq!(entry(&format!("{BLOCK}.weight")), Some((DType::I8, vec![5, 7])));
    assert_eq!(entry(&format!("{BLOCK}.weight_scale")), Some((DType::F32, vec![5])));
    for same in ["proj_out.weight", "single_transformer_blocks.0.attn.norm_q.weight"] {
        assert_eq!(small.tensor(same).unwrap(), source.tensor(same).unwrap());
    }
    let (quantized, exact) = (
        small.tensor(&format!("{BLOCK}.weight")).unwrap(),
        source.tensor(&format!("{BLOCK}.weight")).unwrap(),
    );
    for (found, expected) in quantized.to_f32().unwrap().iter().zip(exact.to_f32().unwrap().iter()) {
        assert!((found - expected).abs() < 0.5 / 127.0 + 4e-3, "{found}, expected {expected}");
    }
}

/// The dtype of a weight that isn't packed.
fn dtype(layer: &HostLinear) -> DType {
    match layer.weight() {
        LinearWeight::Dense(matrices) | LinearWeight::Int8 { rows: matrices, .. } => matrices[0].dtype(),
        LinearWeight::Packed(packed) => panic!("expected no packed matrices, found {}", packed[0].format()),
    }
}

#[test]
fn layers_have_the_requested_precision() {
    let dir = folder();
    for (source, stored) in
        [(WeightSource::open(dir.path().join("model.safetensors")).unwrap(), false), (quantized(&dir), true)]
    {
        assert_eq!(source.is_int8(&format!("{BLOCK}.weight")), stored);
        assert_eq!(
            source.preferred_precision(3, true, true),
            if stored { LinearPrecision::Int8 { threads: 3 } } else { LinearPrecision::Float }
        );
        match source.root().linear(BLOCK, 5, 7).unwrap().weight() {
            LinearWeight::Packed(rows) => assert!(stored && rows[0].format() == Format::I8),
            LinearWeight::Dense(rows) => assert!(!stored && rows[0].dtype() == DType::BF16),
            other => panic!("{other:?}"),
        }
        let vars = source.root().with_precision(LinearPrecision::Int8 { threads: 2 });
        assert_eq!(dtype(&vars.linear(BLOCK, 5, 7).unwrap()), DType::I8);
        assert_eq!(dtype(&vars.linear("proj_out", 4, 6).unwrap()), DType::BF16);
    }
}

#[test]
fn quantizing_at_load_gives_the_same_as_the_quantized_file() {
    let dir = folder();
    let at_load = WeightSource::open(dir.path().join("model.safetensors")).unwrap();
    let stored = quantized(&dir);
    let layers = |source: &WeightSource| {
        let blocks =
            source.root().with_precision(LinearPrecision::Int8 { threads: 3 }).at("transformer_blocks");
        [0, 1].map(|i| blocks.at(i).at("attn").linear("to_q", 6, 10).unwrap())
    };
    assert_eq!(layers(&at_load), layers(&stored));
}

#[test]
fn errors_of_quantize_leave_no_file_behind() {
    let dir = folder();
    let out = dir.path().join("again.safetensors");
    let small = quantized(&dir);
    let message = quantize(&small, &out, 1, &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(message.contains("out.safetensors") && message.ends_with("they are int8 already"), "{message}");

    let file = dir.path().join("vae.safetensors");
    save::save(&file, &[("decoder.conv_in.weight", values(1, [4, 4]))], &BTreeMap::new()).unwrap();
    let vae = WeightSource::open(&file).unwrap();
    let message = quantize(&vae, &out, 1, &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(message.ends_with("there are no float matrices under `transformer_blocks`"), "{message}");

    let bad = HostTensor::from_f32([1, 2], vec![1.0, f32::NAN]).unwrap();
    let file = dir.path().join("bad.safetensors");
    save::save(&file, &[("transformer_blocks.0.ff.linear_in.weight", bad)], &BTreeMap::new()).unwrap();
    let message =
        quantize(&WeightSource::open(&file).unwrap(), &out, 1, &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(
        message.contains("`transformer_blocks.0.ff.linear_in.weight`") && message.ends_with("not finite"),
        "{message}"
    );

    let source = WeightSource::open(dir.path().join("model.safetensors")).unwrap();
    let stop = || Error::NotFound { path: "stopped".into() };
    assert!(quantize(&source, &out, 1, &mut |done, _| if done < 3 { Ok(()) } else { Err(stop()) }).is_err());
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!out.exists() && left.len() == 4, "{left:?}");
}
