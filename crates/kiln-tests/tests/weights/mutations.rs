//! Damaged files must give errors or other weights, but never a panic. The fuzz targets go further; these run everywhere.

use crate::common::{Random, lora, tensors};
use bytes::Bytes;
use kiln_weights::{Lora, WeightSource};

/// Reads everything in a file.
fn read_weights(data: Bytes) -> bool {
    let Ok(source) = WeightSource::from_bytes("a", data) else { return false };
    for name in source.names() {
        let tensor = source.tensor(name).unwrap();
        assert_eq!(source.entry(name), Some((tensor.dtype(), tensor.shape())));
    }
    source.fingerprint().unwrap();
    let _ = (source.bytes(), source.parameters(), source.tensor("\u{fffd}").unwrap_err().to_string());
    true
}

fn read_lora(data: Bytes) -> bool {
    let Ok(lora) = Lora::from_bytes("a", data) else { return false };
    assert!(lora.rank() > 0);
    assert!(lora.modules().all(|m| lora.scale(m).unwrap().is_finite()));
    let base = WeightSource::from_bytes("b", tensors(&[("x.weight", &[6, 4])], &[])).unwrap();
    if let Ok((updates, _)) = crate::common::resolve(&base, [(lora, 1.0)]) {
        let _ = base.root().with_loras(&updates).linear("x", 6, 4);
    }
    true
}

/// Changes, removes and inserts bytes, most of them in the header, where they have the most effect.
fn mutate(original: &[u8], random: &mut Random) -> Bytes {
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let mut data = original.to_vec();
    for _ in 0..1 + random.below(3) {
        let limit = if random.below(8) == 0 { data.len() } else { header.min(data.len()) };
        let at = random.below(limit.max(1));
        match random.below(6) {
            0 => data.truncate(at),
            1 => data.insert(at.min(data.len()), random.below(256) as u8),
            2 if at < data.len() => drop(data.remove(at)),
            _ if at >= data.len() => {}
            3 => data[at] ^= 1 << random.below(8),
            4 => data[at] = random.below(256) as u8,
            // Another digit keeps the JSON valid and makes its numbers wrong.
            _ => match data[at..].iter().position(u8::is_ascii_digit) {
                Some(digit) => data[at + digit] = b'0' + random.below(10) as u8,
                None => data[at] = b'9',
            },
        }
    }
    // Half of the time, correct the header's length, so that its content is parsed.
    if random.below(2) == 0 && data.len() >= 8 {
        let length = (header + data.len()).saturating_sub(original.len() + 8) as u64;
        data[..8].copy_from_slice(&length.to_le_bytes());
    }
    data.into()
}

/// Reads mutants of `original`, and returns how many were readable.
fn readable_mutants(original: Bytes, read: impl Fn(Bytes) -> bool) -> usize {
    assert!(read(original.clone()));
    let mut random = Random(1);
    (0..6000).filter(|_| read(mutate(&original, &mut random))).count()
}

#[test]
fn damaged_weights_never_panic() {
    let names: [(&str, &[usize]); 3] = [("a.weight", &[3, 5]), ("b", &[]), ("c.bias", &[7])];
    let readable = readable_mutants(tensors(&names, &[("format", "pt")]), read_weights);
    assert!((100..5000).contains(&readable), "{readable} of 6000 are readable: the mutations test nothing");
}

#[test]
fn damaged_loras_never_panic() {
    let adapter = r#"{"transformer.r":4,"transformer.lora_alpha":8,"transformer.use_rslora":true,
        "transformer.rank_pattern":{"^y":2},"transformer.alpha_pattern":{"y|z\\.\\d+":3.5}}"#;
    let modules = [("x", 4, 6, 4), ("y", 2, 3, 3)];
    let readable = readable_mutants(lora(&modules, &[("lora_adapter_metadata", adapter)]), read_lora);
    assert!((100..5000).contains(&readable), "{readable} of 6000 are readable: the mutations test nothing");
}
