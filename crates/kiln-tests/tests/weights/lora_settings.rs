//! Where the settings of a LoRA are found: in the header, in `adapter_config.json`, in the header of a GGUF file. None is
//! passed over without a word, since then the LoRA would have another strength.

use std::fs;
use std::path::Path;

use crate::common::{lora, tensors};
use kiln_weights::{Error, Lora, LoraProblem, Result};
use tempfile::TempDir;

const Q: (&str, usize, usize, usize) = ("transformer_blocks.0.attn.to_q", 4, 6, 6);
const SCALE_4: &str = r#"{"peft_type":"LORA","r":4,"lora_alpha":16}"#;

/// A folder with a LoRA of rank 4 of this name, and this `adapter_config.json`.
fn folder(name: &str, config: &[u8]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(name), lora(&[Q], &[])).unwrap();
    fs::write(folder.path().join("adapter_config.json"), config).unwrap();
    folder
}

fn scale(path: &Path) -> Result<f64> {
    Lora::open(path).map(|lora| lora.scale(Q.0).unwrap())
}

fn header(settings: &str) -> Result<f64> {
    let file = lora(&[Q], &[("lora_adapter_metadata", settings)]);
    Lora::from_bytes("a", file).map(|lora| lora.scale(Q.0).unwrap())
}

fn reason(result: Result<f64>) -> String {
    match result.unwrap_err() {
        Error::Lora { problem, .. } => match *problem {
            LoraProblem::Metadata { reason, .. } => reason,
            other => panic!("{other}"),
        },
        other => panic!("{other}"),
    }
}

#[test]
fn an_adapter_config_that_can_not_be_read_is_an_error_with_its_name() {
    let utf16: Vec<u8> = SCALE_4.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for (config, expected) in [
        (&b"{\"r\":4,\"base_model_name_or_path\":\"/caf\xe9\"}"[..], "it is not UTF-8 text"),
        (&[&[0xff, 0xfe], &utf16[..]].concat(), "it is not UTF-8 text"),
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"{}", "it has no settings"),
        (b"[", "EOF while parsing"),
    ] {
        let folder = folder("adapter_model.safetensors", config);
        for path in [folder.path().to_owned(), folder.path().join("adapter_model.safetensors")] {
            let message = scale(&path).unwrap_err().to_string();
            assert!(message.contains("adapter_config.json`") && message.contains(expected), "{message}");
        }
    }
    let folder = folder("adapter_model.safetensors", b"");
    let config = folder.path().join("adapter_config.json");
    fs::remove_file(&config).unwrap();
    fs::create_dir(&config).unwrap();
    assert!(scale(folder.path()).unwrap_err().to_string().contains("adapter_config.json"));
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_must_lead_somewhere() {
    use std::os::unix::fs::symlink;
    let (folder, other) =
        (folder("adapter_model.safetensors", SCALE_4.as_bytes()), tempfile::tempdir().unwrap());
    // As in a cache of downloads, whose files are links themselves.
    let (blob, model) = (other.path().join("blob"), folder.path().join("adapter_model.safetensors"));
    fs::rename(&model, &blob).unwrap();
    symlink(&blob, &model).unwrap();
    assert_eq!(scale(&model).unwrap(), 4.0);
    let link = other.path().join("style.safetensors");
    symlink(&model, &link).unwrap();
    assert_eq!(scale(&link).unwrap(), 4.0);
    let config = folder.path().join("adapter_config.json");
    fs::remove_file(&config).unwrap();
    symlink("nowhere", &config).unwrap();
    assert!(scale(&model).unwrap_err().to_string().contains("adapter_config.json`"));
}

#[test]
fn an_adapter_config_may_begin_with_a_byte_order_mark() {
    let folder = folder("adapter_model.safetensors", &[b"\xef\xbb\xbf", SCALE_4.as_bytes()].concat());
    assert_eq!(scale(folder.path()).unwrap(), 4.0);
}

#[test]
fn an_adapter_config_is_used_for_every_name_of_a_lora_that_must_be_its() {
    for name in ["adapter_model.fp16.safetensors", "Adapter_Model.safetensors"] {
        let folder = folder(name, SCALE_4.as_bytes());
        fs::write(folder.path().join("other.safetensors"), lora(&[Q], &[])).unwrap();
        assert_eq!(scale(&folder.path().join(name)).unwrap(), 4.0, "{name}");
    }
    // Alone with it.
    let folder = folder("style.safetensors", SCALE_4.as_bytes());
    assert_eq!(scale(&folder.path().join("style.safetensors")).unwrap(), 4.0);
    assert_eq!(scale(folder.path()).unwrap(), 4.0);
    // Beside others it may be theirs.
    fs::write(folder.path().join("other.safetensors"), lora(&[Q], &[])).unwrap();
    let opened = Lora::open(folder.path().join("style.safetensors")).unwrap();
    assert_eq!(opened.scale(Q.0), Some(1.0));
    assert!(opened.notes()[0].starts_with("the adapter_config.json beside it is not used"));
    // Windows replaces no file that is mapped.
    drop(opened);
    let settings = [("lora_adapter_metadata", r#"{"r":4,"lora_alpha":8}"#)];
    fs::write(folder.path().join("style.safetensors"), lora(&[Q], &settings)).unwrap();
    let opened = Lora::open(folder.path().join("style.safetensors")).unwrap();
    assert_eq!((opened.scale(Q.0), opened.notes().len()), (Some(2.0), 0));
}

#[test]
fn an_adapter_config_is_used_for_shards() {
    let folder = folder("x", SCALE_4.as_bytes());
    let [a, b] = ["A", "B"].map(|ab| format!("base_model.model.{}.lora_{ab}.weight", Q.0));
    let shards = [1, 2].map(|i| format!("adapter_model-0000{i}-of-00002.safetensors"));
    fs::write(folder.path().join(&shards[0]), tensors(&[(&a, &[4, 6])], &[])).unwrap();
    fs::write(folder.path().join(&shards[1]), tensors(&[(&b, &[6, 4])], &[])).unwrap();
    let index = serde_json::json!({ "weight_map": { a: shards[0], b: shards[1] } });
    let path = folder.path().join("adapter_model.safetensors.index.json");
    fs::write(&path, index.to_string()).unwrap();
    assert_eq!(scale(&path).unwrap(), 4.0);
    assert_eq!(scale(folder.path()).unwrap(), 4.0);
}

#[test]
fn settings_in_the_header_hide_the_file_only_if_they_are_the_transformers() {
    for (settings, expected) in [
        ("", 4.0),
        (" ", 4.0),
        ("{}", 4.0),
        (r#"{"text_encoder.r":8,"text_encoder.lora_alpha":8}"#, 4.0),
        (r#"{"text_encoder":{"r":8,"lora_alpha":8}}"#, 4.0),
        (r#"{"transformer.r":4,"transformer.lora_alpha":8}"#, 2.0),
    ] {
        let folder = folder("adapter_model.safetensors", SCALE_4.as_bytes());
        let file = lora(&[Q], &[("lora_adapter_metadata", settings)]);
        fs::write(folder.path().join("adapter_model.safetensors"), file).unwrap();
        assert_eq!(scale(folder.path()).unwrap(), expected, "{settings}");
    }
}

#[test]
fn settings_may_be_grouped_in_several_ways() {
    for settings in [
        r#"{"unet.r":4,"unet.lora_alpha":16}"#,
        r#"{"base_model.model.r":4,"base_model.model.lora_alpha":16}"#,
        r#"{"transformer":{"r":4,"lora_alpha":16}}"#,
        r#"{"default":{"r":4,"lora_alpha":16,"loftq_config":{"r":1}}}"#,
        r#"{"text_encoder":{"default":{"r":8}},"transformer":{"default":{"r":4,"lora_alpha":16}}}"#,
        r#"{"r":4,"lora_alpha":16,"transformer.foo":1}"#,
        r#"{"r":4,"lora_alpha":16,"text_encoder.r":8}"#,
        r#"{"r":4,"lora_alpha":1,"transformer.r":4,"transformer.lora_alpha":16}"#,
    ] {
        assert_eq!(header(settings).unwrap(), 4.0, "{settings}");
    }
    for settings in [r#"{"foo":1}"#, r#"{"transformer.foo":1}"#, r#"{"text_encoder.r":8,"foo":{"bar":1}}"#] {
        assert!(reason(header(settings)).starts_with("it has none of PEFT's settings"), "{settings}");
    }
    for settings in [
        r#"{"r":4,"lora_alpha":16,"transformer.use_rslora":true}"#,
        r#"{"first":{"r":4,"lora_alpha":4},"second":{"r":4,"lora_alpha":16}}"#,
    ] {
        assert!(reason(header(settings)).starts_with("it has settings for "), "{settings}");
    }
}

#[test]
fn settings_without_rank_and_alpha_have_the_defaults_of_peft() {
    assert_eq!(header(r#"{"rank_pattern":{"to_q":4},"alpha_pattern":{"to_q":16}}"#).unwrap(), 4.0);
    assert_eq!(header(r#"{"transformer.rank_pattern":{"to_q":4}}"#).unwrap(), 2.0);
    // Rank 8, of which the matrices are not.
    for settings in [r#"{"use_rslora":true}"#, r#"{"peft_type":"LORA"}"#, r#"{"alpha_pattern":{"to_q":16}}"#]
    {
        let message = header(settings).unwrap_err().to_string();
        assert!(message.contains("rank 8"), "{message}");
    }
}

#[test]
fn flags_must_be_true_or_false() {
    for (flag, value) in
        [("use_rslora", "1"), ("use_rslora", "\"true\""), ("use_dora", "0"), ("use_dora", "[]")]
    {
        let settings = format!(r#"{{"r":4,"lora_alpha":16,"{flag}":{value}}}"#);
        assert_eq!(reason(header(&settings)), format!("`{flag}` is neither true nor false"));
    }
    assert_eq!(header(r#"{"r":4,"lora_alpha":16,"use_rslora":null}"#).unwrap(), 4.0);
}

#[test]
fn an_alpha_of_zero_or_out_of_range_is_an_error() {
    let zero = format!("the alpha of `{}` is 0", Q.0);
    assert_eq!(reason(header(r#"{"r":4,"lora_alpha":0}"#)), zero);
    assert_eq!(reason(header(r#"{"r":4,"lora_alpha":4,"alpha_pattern":{"to_q":0}}"#)), zero);
    for alpha in ["1e300", "-1e300", "1e-300"] {
        let message = header(&format!(r#"{{"r":4,"lora_alpha":{alpha}}}"#)).unwrap_err().to_string();
        assert!(message.ends_with("which is out of range"), "{message}");
    }
}

#[test]
fn patterns_match_modules_that_a_converter_renamed() {
    let settings =
        r#"{"r":1,"lora_alpha":1,"alpha_pattern":{"attn.to_q":16,"attn.to_k":16,"attn.to_v":16,"to_z":3}}"#;
    let opened = |stem: &str, settings: &str| {
        let [down, up] = ["down", "up"].map(|part| format!("{stem}.lora_{part}.weight"));
        let keys: [(&str, &[usize]); 2] = [(&down, &[1, 6]), (&up, &[6, 1])];
        Lora::from_bytes("a", tensors(&keys, &[("lora_adapter_metadata", settings)]))
    };
    for (stem, name) in [
        ("lora_unet_transformer_blocks_0_attn_to_q", "transformer_blocks_0_attn_to_q"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.qkv"),
    ] {
        let lora = opened(stem, settings).unwrap();
        assert_eq!(lora.scale(name), Some(16.0), "{stem}");
        let note = lora.notes().remove(0);
        assert!(
            note.starts_with("patterns of its settings match none of its modules: ")
                && note.contains("`to_z`")
        );
    }
    let qkv = "diffusion_model.double_blocks.0.img_attn.qkv";
    let one = opened(qkv, r#"{"r":1,"lora_alpha":1,"alpha_pattern":{"attn.to_q":16}}"#);
    let message = one.unwrap_err().to_string();
    assert!(message.contains("differ for the layers that `double_blocks.0.img_attn.qkv` fuses"), "{message}");
}

#[test]
fn look_around_in_a_pattern_is_named() {
    let reason = reason(header(r#"{"r":4,"lora_alpha":4,"alpha_pattern":{"(?<!x)to_q":16}}"#));
    assert_eq!(
        reason,
        "pattern `(?<!x)to_q` of `alpha_pattern`: look-around is not supported; write the names out"
    );
}

/// A GGUF file of a LoRA of rank 4, with these values in its header.
fn gguf(settings: &[(&str, Setting<'_>)]) -> Result<Lora> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let tensors = [("A", [6u64, 4]), ("B", [4, 6])];
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((settings.len() as u64).to_le_bytes());
    for (key, value) in settings {
        bytes.extend(text(key));
        match value {
            Setting::Float(value) => bytes.extend([6u32.to_le_bytes(), value.to_le_bytes()].concat()),
            Setting::Text(value) => bytes.extend([&8u32.to_le_bytes(), &text(value)[..]].concat()),
        }
    }
    for (i, (ab, [cols, rows])) in tensors.into_iter().enumerate() {
        bytes.extend(text(&format!("transformer.{}.lora_{ab}.weight", Q.0)));
        bytes.extend(2u32.to_le_bytes());
        bytes.extend([cols, rows].iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(0u32.to_le_bytes());
        bytes.extend((i as u64 * 96).to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32) + 192, 0);
    Lora::from_bytes("a.gguf", bytes.into())
}

enum Setting<'s> {
    Float(f32),
    Text(&'s str),
}

#[test]
fn the_alpha_in_the_header_of_a_gguf_file_counts() {
    let (kind, alpha) =
        (("adapter.type", Setting::Text("lora")), ("adapter.lora.alpha", Setting::Float(16.0)));
    assert_eq!(gguf(&[kind, alpha]).unwrap().scale(Q.0), Some(4.0));
    assert_eq!(gguf(&[]).unwrap().scale(Q.0), Some(1.0));
    let message = |settings: &[_]| gguf(settings).unwrap_err().to_string();
    let other = message(&[("adapter.type", Setting::Text("control_vector"))]);
    assert!(
        other.ends_with("its GGUF header has adapter.type (control_vector), which is not supported"),
        "{other}"
    );
    for alpha in [Setting::Float(f32::NAN), Setting::Text("many"), Setting::Float(0.0)] {
        let message = message(&[("adapter.lora.alpha", alpha)]);
        assert!(message.contains("its GGUF header is not usable"), "{message}");
    }
    let both = [
        ("adapter.lora.alpha", Setting::Float(16.0)),
        ("lora_adapter_metadata", Setting::Text(r#"{"r":4,"lora_alpha":8}"#)),
    ];
    assert!(message(&both).contains("adapter.lora.alpha beside it"));
}

#[test]
fn problems_with_an_adapter_config_name_it() {
    for config in [
        r#"{"r":8,"lora_alpha":8}"#,
        r#"{"peft_type":"OFT"}"#,
        r#"{"peft_type":"LOKR","r":4,"alpha":8}"#,
        r#"{"r":4,"lora_alpha":8,"use_dora":true}"#,
    ] {
        let folder = folder("adapter_model.safetensors", config.as_bytes());
        let error = scale(folder.path()).unwrap_err();
        assert!(error.to_string().contains("adapter_config.json`"), "{error}");
    }
}
