//! Signing a finished file: nothing may be added to it afterwards.

use std::cell::Cell;

use kiln_image::{Format, ManifestPlace};
use ring::digest::{Context, SHA256};

use crate::manifest::{self, Binding, Statement};
use crate::{Error, Result, Signer};

/// Adds a signed statement to an image file.
pub fn sign(file: &[u8], format: Format, statement: &Statement, signer: &Signer) -> Result<Vec<u8>> {
    signer.check()?;
    let (id, format) = (uuid()?, format.media_type());
    // A token of a time stamp may be longer than those before it, and takes more room then.
    const ATTEMPTS: usize = 3;
    for _ in 0..ATTEMPTS {
        let length = signer.seal_length();
        let build = |binding: &Binding, seal: &dyn Fn(&[u8]) -> Result<Vec<u8>>| {
            manifest::store(statement, binding, &id, format, seal)
        };
        let (mut binding, place) = measured(file, |binding| build(binding, &|_| Ok(vec![0; length])))?;
        let mut hash = Context::new(&SHA256);
        place.rest().for_each(|part| hash.update(part));
        binding.hash = hash.finish().as_ref().to_vec();
        let is_too_long = Cell::new(false);
        let store = build(&binding, &|claim| {
            let seal = signer.seal(claim, length)?;
            is_too_long.set(seal.is_none());
            Ok(seal.unwrap_or_default())
        })?;
        if !is_too_long.get() {
            return Ok(place.fill(&store));
        }
    }
    Err(Error::Signing("signatures or time stamps have no fixed length".into()))
}

/// Finds the place of a store. Its length is written in it, and in some files before it: a few rounds until it stays the same.
fn measured(
    file: &[u8],
    build: impl Fn(&Binding) -> Result<Vec<u8>>,
) -> Result<(Binding, ManifestPlace<'_>)> {
    const ROUNDS: usize = 8;
    let mut binding = Binding { range: 0..0, hash: vec![0; SHA256.output_len()], padding: 0 };
    for _ in 0..ROUNDS {
        let mut length = build(&binding)?.len();
        if length % 2 == 1 {
            binding.padding = 1 - binding.padding;
            length = build(&binding)?.len();
        }
        let place = ManifestPlace::new(file, length)?;
        if place.range() == binding.range {
            return Ok((binding, place));
        }
        binding.range = place.range();
    }
    Err(Error::Signing("the length of the credentials does not settle".into()))
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
