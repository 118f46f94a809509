//! Signing a finished file: nothing may be added to it afterwards.

use kiln_image::{Format, with_manifest_store};
use ring::digest::{Context, SHA256};

use crate::manifest::{self, Binding, Statement};
use crate::{Error, Result, Signer};

/// Adds a signed statement to an image file.
pub fn sign(file: &[u8], format: Format, statement: &Statement, signer: &Signer) -> Result<Vec<u8>> {
    signer.check()?;
    let (id, format) = (uuid()?, format.media_type());
    let build = |binding: &Binding| manifest::store(statement, binding, &id, format, signer);
    // The length of the store is written in it, and in some files before it: a few rounds until it stays the same.
    let mut binding = Binding { range: 0..0, hash: vec![0; 32] };
    let mut length = 0;
    for _ in 0..8 {
        let found = build(&binding)?.len();
        if found == length {
            break;
        }
        length = found;
        binding.range = with_manifest_store(file, &vec![0; length])?.1;
    }
    let (unsigned, range) = with_manifest_store(file, &vec![0; length])?;
    let mut hash = Context::new(&SHA256);
    hash.update(&unsigned[..range.start]);
    hash.update(&unsigned[range.end..]);
    let store = build(&Binding { range: range.clone(), hash: hash.finish().as_ref().to_vec() })?;
    let (signed, place) = with_manifest_store(file, &store)?;
    if place != range {
        return Err(Error::Signing("signatures of the key have no fixed length".into()));
    }
    Ok(signed)
}

/// A random UUID.
fn uuid() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::Signing(error.to_string()))?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = kiln_base::hex(bytes);
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}
