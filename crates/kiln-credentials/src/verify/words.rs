//! C2PA's codes in plain words.

use encypher_c2pa::VerificationStatus;

use super::text::text;
use crate::Problem;

/// Nobody vouches for the signer.
pub(super) const UNTRUSTED: &str = "signingCredential.untrusted";

/// Whether a failure makes credentials invalid. Without a network some things can't be known, which is none: whether a
/// certificate was revoked, what lies elsewhere, who else has signed.
pub(super) fn is_fatal(status: &VerificationStatus) -> bool {
    let code = &status.code[..];
    let is_elsewhere = status.details.as_ref().is_some_and(|details| details["external_data"] == true);
    let is_open = matches!(
        code,
        UNTRUSTED
            | "signingCredential.ocsp.skipped"
            | "signingCredential.ocsp.inaccessible"
            | "signingCredential.ocsp.unknown"
            | "timeStamp.untrusted"
            | "timeStamp.outsideValidity"
            | "assertion.inaccessible"
    );
    !is_open && !is_elsewhere && !code.starts_with("cawg.") && !code.starts_with("com.encypher.")
}

pub(super) fn problem(code: &str) -> Problem {
    let message = match code {
        UNTRUSTED => "the signer's certificate is not of an authority that is known here",
        "signingCredential.invalid" => "the signer's certificate must not be used for this",
        "signingCredential.expired" | "claimSignature.outsideValidity" => {
            "the signer's certificate has expired, or was not valid yet, and no time stamp shows that it was valid"
        }
        "signingCredential.ocsp.revoked" | "signingCredential.revoked" => {
            "the signer's certificate was revoked"
        }
        "claimSignature.mismatch" => "the signature does not fit: the credentials were changed after signing",
        "claimSignature.missing" => "the signature is missing",
        "assertion.dataHash.mismatch" | "assertion.boxesHash.mismatch" => {
            "the file was changed after signing"
        }
        "assertion.dataHash.malformed" | "assertion.boxesHash.malformed" | "claim.hardBindings.missing" => {
            "the credentials do not say which file they belong to"
        }
        "assertion.hashedURI.mismatch" => "a part of the credentials was changed after signing",
        "assertion.missing" => "a part of the credentials is missing",
        "ingredient.manifest.mismatch" | "ingredient.claimSignature.mismatch" => {
            "the credentials of an image that it was made from were changed"
        }
        "ingredient.manifest.missing" | "ingredient.claimSignature.missing" => {
            "the credentials of an image that it was made from are missing"
        }
        "algorithm.unsupported" => "the signature is of a kind that is not known here",
        "kiln.failed" => "the check failed on this file: its credentials are damaged",
        code if code.starts_with("timeStamp.") => "the time stamp can't be relied on",
        code if code.starts_with("signingCredential.ocsp.") => {
            "whether the certificate was revoked is not known"
        }
        code if code.starts_with("cawg.") => "a further signature inside the credentials is not valid",
        code if code.starts_with("ingredient.") => "what is said of an image that it was made from is wrong",
        _ => "the credentials are damaged",
    };
    Problem { code: text(code), message: message.into() }
}
