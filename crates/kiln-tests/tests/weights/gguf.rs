//! GGUF files: round trips, and everything that can be wrong with a header.

use crate::common::Random;
use kiln_tensor::HostTensor;
use kiln_tensor::packed::Format;
use kiln_weights::export::{Container, Options, Storage, TensorNames, export};
use kiln_weights::{Component, MetadataArray, WeightSource, save};

/// A file written field by field.
#[derive(Clone)]
struct GgufFile {
    version: u32,
    tensors: Vec<(String, Vec<u64>, u32, u64)>,
    metadata: Vec<u8>,
    metadata_count: u64,
    tensor_count: Option<u64>,
    data: usize,
}

impl GgufFile {
    fn new() -> GgufFile {
        let tensors = vec![("a.weight".into(), vec![32, 2], 8, 0), ("b".into(), vec![3], 0, 96)];
        GgufFile {
            version: 3,
            tensors,
            metadata: Vec::new(),
            metadata_count: 0,
            tensor_count: None,
            data: 108,
        }
    }

    fn with_metadata(mut self, key: &str, value_type: u32, value: &[u8]) -> GgufFile {
        self.metadata.extend(text(key));
        self.metadata.extend(value_type.to_le_bytes());
        self.metadata.extend(value);
        self.metadata_count += 1;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.metadata_count.to_le_bytes());
        bytes.extend(&self.metadata);
        for (name, dims, type_id, offset) in &self.tensors {
            bytes.extend(text(name));
            bytes.extend((dims.len() as u32).to_le_bytes());
            bytes.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
            bytes.extend(type_id.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend((0..self.data).map(|i| i as u8 & 0x3b));
        bytes
    }

    fn error(&self) -> String {
        WeightSource::from_bytes("a.gguf", self.bytes()).unwrap_err().to_string()
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

#[test]
fn tensors_and_metadata_are_read() {
    let list = [&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &text("x"), &text("yz")].concat();
    let integers = [&3i32.to_le_bytes()[..], &(-1i32).to_le_bytes()].concat();
    let types = [&5u32.to_le_bytes()[..], &2u64.to_le_bytes(), &integers].concat();
    let scores = [&6u32.to_le_bytes()[..], &1u64.to_le_bytes(), &0.5f32.to_le_bytes()].concat();
    let file = GgufFile::new()
        .with_metadata("general.architecture", 8, &text("qwen3"))
        .with_metadata("qwen3.rope.freq_base", 6, &5e5f32.to_le_bytes())
        .with_metadata("tokenizer.ggml.tokens", 9, &list)
        .with_metadata("tokenizer.ggml.token_type", 9, &types)
        .with_metadata("tokenizer.ggml.scores", 9, &scores);
    for version in [2, 3] {
        let source =
            WeightSource::from_bytes("a.gguf", GgufFile { version, ..file.clone() }.bytes()).unwrap();
        assert_eq!(source.names().collect::<Vec<_>>(), ["a.weight", "b"]);
        assert_eq!(source.packed_format("a.weight"), Some(Format::Q8_0));
        assert_eq!(source.entry("a.weight").unwrap().1.dims(), [2, 32]);
        assert_eq!(source.tensor("a.weight").unwrap().numel(), 64);
        assert_eq!(source.metadata()["qwen3.rope.freq_base"], "500000");
        assert_eq!(source.metadata()["tokenizer.ggml.tokens"], "[2 values]");
        let tokens = source.gguf_array("tokenizer.ggml.tokens").unwrap();
        assert_eq!(tokens, Some(MetadataArray::Strings(vec!["x", "yz"])));
        let types = source.gguf_array("tokenizer.ggml.token_type").unwrap();
        assert_eq!(types, Some(MetadataArray::Integers(vec![3, -1])));
        assert_eq!(source.gguf_array("tokenizer.ggml.scores").unwrap(), None, "floats");
        assert_eq!(source.gguf_array("general.architecture").unwrap(), None, "no array");
        assert_eq!((source.parameters(), source.bytes()), (67, 68 + 12));
    }
}

#[test]
fn a_matrix_of_one_row_or_column_is_a_vector() {
    for dims in [vec![3], vec![3, 1], vec![1, 3]] {
        let mut file = GgufFile::new();
        file.tensors[1].1 = dims.clone();
        let source = WeightSource::from_bytes("a.gguf", file.bytes()).unwrap();
        assert_eq!(source.entry("b").unwrap().1.dims(), [3], "{dims:?}");
        assert_eq!(source.entry("a.weight").unwrap().1.dims(), [2, 32]);
    }
}

#[test]
fn a_part_of_a_split_file_says_which_it_is() {
    let part = |number: u16, count: u16| {
        let number = GgufFile::new().with_metadata("split.no", 2, &number.to_le_bytes());
        number.with_metadata("split.count", 2, &count.to_le_bytes())
    };
    assert_eq!(part(2, 4).error(), "can't read `a.gguf`: it is part 3 of 4 of a split GGUF file");
    assert!(WeightSource::from_bytes("a.gguf", part(0, 1).bytes()).is_ok(), "one part is the whole file");
}

#[test]
fn invalid_headers_are_errors() {
    let valid = GgufFile::new;
    let cases: Vec<(GgufFile, &str)> = vec![
        (GgufFile { version: 1, ..valid() }, "version 1"),
        (GgufFile { version: 3u32.swap_bytes(), ..valid() }, "big-endian"),
        (GgufFile { tensor_count: Some(u64::MAX), ..valid() }, "needs"),
        (GgufFile { metadata_count: u64::MAX, ..valid() }, "needs"),
        (GgufFile { data: 50, ..valid() }, "ends inside or before `a.weight`"),
        (
            GgufFile { tensors: vec![("a".into(), vec![30, 2], 8, 0)], ..valid() },
            "not a multiple of the block size",
        ),
        (GgufFile { tensors: vec![("a".into(), vec![1; 5], 0, 0)], ..valid() }, "5 dimensions"),
        (
            GgufFile { tensors: vec![("a".into(), vec![], 8, 0)], ..valid() },
            "`a` has no dimensions, but type Q8_0",
        ),
        (
            GgufFile { tensors: vec![("a".into(), vec![u64::MAX, 2], 0, 0)], ..valid() },
            "too large for any memory",
        ),
        (
            GgufFile { tensors: vec![("a".into(), vec![1 << 62, 32], 0, 0)], ..valid() },
            "too large for any memory",
        ),
        (
            GgufFile { tensors: vec![("a".into(), vec![4], 0, u64::MAX)], ..valid() },
            "too large for any memory",
        ),
        (
            GgufFile { tensors: vec![("a".into(), vec![4], 0, 0), ("b".into(), vec![4], 0, 8)], ..valid() },
            "inside `a`",
        ),
        (
            GgufFile { tensors: vec![("a".into(), vec![4], 0, 0), ("a".into(), vec![4], 0, 32)], ..valid() },
            "twice",
        ),
        (valid().with_metadata("x", 77, &[]), "unknown type 77"),
        (valid().with_metadata("x", 8, &u64::MAX.to_le_bytes()), "needs"),
        (valid().with_metadata("x", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), "not UTF-8"),
        (
            valid().with_metadata("x", 9, &[&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat()),
            "array of arrays",
        ),
        (
            valid().with_metadata("x", 9, &[&99u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat()),
            "array of unknown type 99",
        ),
        (
            valid().with_metadata("x", 9, &[&10u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat()),
            "needs",
        ),
        (
            valid().with_metadata("x", 9, &[&8u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat()),
            "needs",
        ),
        (valid().with_metadata("general.alignment", 4, &0u32.to_le_bytes()), "general.alignment"),
        (
            valid().with_metadata("general.alignment", 4, &24u32.to_le_bytes()),
            "is 24, expected a power of two",
        ),
        (valid().with_metadata("general.alignment", 8, &text("much")), "general.alignment"),
        (
            GgufFile { tensors: vec![("a".into(), vec![1 << 56, 0], 12, 0)], ..valid() },
            "`a` has shape [0, 72057594037927936]: no elements",
        ),
        // A vector that is longer than its file.
        (
            GgufFile { tensors: vec![("a".into(), vec![1 << 40], 0, 0)], ..valid() },
            "ends inside or before `a`",
        ),
        (
            GgufFile { tensors: vec![("a".into(), vec![u64::MAX / 256 * 256, 2], 12, 0)], ..valid() },
            "too large",
        ),
        (GgufFile { tensors: vec![("a".into(), vec![1; 77], 0, 0)], ..valid() }, "77 dimensions"),
    ];
    for (file, words) in cases {
        let message = file.error();
        assert!(
            message.starts_with("`a.gguf` is not a valid GGUF file: ") && message.contains(words),
            "{words}: {message}"
        );
    }
    let whole = GgufFile::new().bytes();
    for length in 4..whole.len() - 12 {
        assert!(WeightSource::from_bytes("a.gguf", whole[..length].to_vec()).is_err(), "{length}");
    }
}

#[test]
fn types_that_kiln_cannot_read_are_named_with_what_to_take_instead() {
    let unsupported = [
        (9, "Q8_1", "Q8_0"),
        (15, "Q8_K", "Q8_0"),
        (16, "IQ2_XXS", "Q2_K"),
        (17, "IQ2_XS", "Q2_K"),
        (18, "IQ3_XXS", "Q3_K or IQ4_XS"),
        (19, "IQ1_S", "Q2_K"),
        (21, "IQ3_S", "Q3_K or IQ4_XS"),
        (22, "IQ2_S", "Q2_K"),
        (25, "I16", "F16"),
        (29, "IQ1_M", "Q2_K"),
        (31, "Q4_0_4_4", "Q4_0"),
        (34, "TQ1_0", "Q2_K"),
        (35, "TQ2_0", "Q2_K"),
        (39, "MXFP4", "Q4_K or IQ4_XS"),
        (40, "NVFP4", "Q4_K or IQ4_XS, or an nvfp4 safetensors"),
    ];
    let file = |id| GgufFile { tensors: vec![("x.weight".into(), vec![256, 2], id, 0)], ..GgufFile::new() };
    for (id, name, instead) in unsupported {
        let message = file(id).error();
        let expected = format!(
            "can't read `a.gguf`: tensor `x.weight` is stored as {name}, which Kiln does not support; take a {instead} \
             file of the same model (Kiln reads F32, F16, Q4_0, "
        );
        assert!(message.starts_with(&expected) && message.contains("IQ4_NL, IQ4_XS"), "{message}");
    }
    for id in [43, 99, u32::MAX] {
        let message = file(id).error();
        let expected =
            format!("can't read `a.gguf`: tensor `x.weight` has type number {id}, which Kiln does not know");
        assert!(
            message.starts_with(&expected) && message.contains("take a Q4_K or IQ4_XS file"),
            "{message}"
        );
    }
}

#[test]
fn iq4_files_are_read() {
    for (id, format, bytes) in [(20, Format::Iq4Nl, 8 * 18), (23, Format::Iq4Xs, 136)] {
        let tensors = vec![("x.weight".into(), vec![256, 2], id, 0)];
        let file = GgufFile { tensors, data: 2 * bytes, ..GgufFile::new() };
        let source = WeightSource::from_bytes("a.gguf", file.bytes()).unwrap();
        assert_eq!(source.packed_format("x.weight"), Some(format));
        assert_eq!(source.storage_name("x.weight"), Some(format.name()));
        assert_eq!(source.bytes(), 2 * bytes as u64);
        let values = source.tensor("x.weight").unwrap();
        let values = values.to_f32().unwrap();
        assert!(values.iter().all(|v| v.is_finite()) && values.iter().any(|v| *v != 0.0), "{format}");
        let short = GgufFile { data: 2 * bytes - 1, ..file };
        assert!(short.error().contains("ends inside or before `x.weight`"));
    }
}

#[test]
fn damaged_files_never_panic() {
    let list = [&4u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[0; 8]].concat();
    let original = GgufFile::new()
        .with_metadata("a", 9, &list)
        .with_metadata("general.alignment", 4, &32u32.to_le_bytes())
        .bytes();
    let (mut random, mut readable) = (Random(1), 0);
    for _ in 0..6000 {
        let mut data = original.clone();
        for _ in 0..1 + random.below(3) {
            let at = random.below(data.len().max(1));
            match random.below(4) {
                0 => data.truncate(at.max(4)),
                1 if at >= 4 => data.insert(at, random.below(256) as u8),
                _ if at >= data.len() || at < 4 => {}
                2 => data[at] ^= 1 << random.below(8),
                _ => data[at] = random.below(256) as u8,
            }
        }
        let Ok(source) = WeightSource::from_bytes("a.gguf", data.clone()) else { continue };
        readable += 1;
        for name in source.names() {
            let tensor = source.tensor(name).unwrap();
            assert_eq!(Some(tensor.shape()), source.entry(name).map(|(_, shape)| shape));
        }
        assert!(source.bytes() <= data.len() as u64);
        source.fingerprint().unwrap();
    }
    assert!((100..5900).contains(&readable), "{readable} of 6000: the mutations test nothing");
}

#[test]
fn a_model_goes_to_gguf_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let values =
        |count: usize| (0..count).map(|i| (i * 7919 % 1001) as f32 / 500.0 - 1.0).collect::<Vec<_>>();
    let matrix = |rows: usize, cols: usize| HostTensor::from_f32([rows, cols], values(rows * cols)).unwrap();
    let mut tensors = vec![
        ("single_stream_modulation.linear.weight", matrix(6, 4)),
        ("norm_out.linear.weight", matrix(4, 2)),
        ("single_transformer_blocks.0.attn.to_out.weight", matrix(5, 512)),
        ("single_transformer_blocks.0.attn.norm_q.weight", HostTensor::from_f32([4], values(4)).unwrap()),
    ];
    for name in ["to_q", "to_k", "to_v"] {
        let name: &str = Box::leak(format!("transformer_blocks.0.attn.{name}.weight").into_boxed_str());
        tensors.push((name, matrix(3, 64)));
    }
    let (from, to, back) =
        (dir.path().join("a.safetensors"), dir.path().join("b.gguf"), dir.path().join("c.safetensors"));
    save::save(&from, &tensors, &Default::default()).unwrap();
    let mut options = Options {
        component: Component::Transformer,
        container: Container::Gguf,
        names: TensorNames::Original,
        storage: Storage::Quantized(Format::Q6K),
        threads: 3,
    };
    let source = WeightSource::open(&from).unwrap();
    let report = export(&source, &to, &options, &mut |_, _| Ok(())).unwrap();
    let kinds: Vec<_> = report.groups.iter().map(|g| (g.name.as_str(), g.layers)).collect();
    assert_eq!(kinds, [("single_transformer_blocks.attn.to_out", 1), ("transformer_blocks.attn.to_q", 1)]);
    assert!(report.groups.iter().all(|g| g.error > 1e-4 && g.error < 0.02), "{:?}", report.groups);
    let written = WeightSource::open(&to).unwrap();
    let stored = |name: &str| written.storage_name(name).unwrap();
    assert_eq!(stored("single_blocks.0.linear2.weight"), "q6_k");
    assert_eq!(stored("double_blocks.0.img_attn.qkv.weight"), "q8_0", "rows of 64 don't fit blocks of 256");
    assert_eq!(stored("single_blocks.0.norm.query_norm.scale"), "f32");

    options = Options {
        container: Container::Safetensors,
        names: TensorNames::Diffusers,
        storage: Storage::Keep,
        ..options
    };
    let model = written.component(Component::Transformer).unwrap().unwrap();
    export(&model, &back, &options, &mut |_, _| Ok(())).unwrap();
    let back = WeightSource::open(&back).unwrap();
    assert_eq!(back.names().collect::<Vec<_>>(), source.names().collect::<Vec<_>>());
    for (name, tensor) in &tensors {
        let (found, expected) = (back.tensor(name).unwrap(), tensor.to_f32().unwrap());
        let near = found.to_f32().unwrap().iter().zip(expected.iter()).all(|(f, e)| (f - e).abs() < 0.05);
        assert!(near && found.shape() == tensor.shape(), "{name}");
    }
    options.storage = Storage::Quantized(Format::Q4_0);
    let error = export(&source, &dir.path().join("d.safetensors"), &options, &mut |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("GGUF file"), "{error}");
    assert!(!dir.path().join("d.safetensors").exists());
}
