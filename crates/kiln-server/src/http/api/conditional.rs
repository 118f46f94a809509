//! What a request wants of a file, by its headers: nothing if the client has it, a part of it, or all of it.

use std::fs::Metadata;
use std::ops::Range;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use kiln_base::hex;
use sha2::{Digest, Sha256};

use super::error::ApiError;
use crate::jobs::error::ErrorCode;

/// A strong validator: two files with the same tag have the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ETag(String);

impl ETag {
    /// The tag of a file that never changes under its name.
    pub(crate) fn of_name(name: &str) -> ETag {
        let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        ETag(format!("\"{}\"", name.chars().filter(plain).collect::<String>()))
    }

    /// The tag of these bytes.
    pub(crate) fn of_bytes(bytes: &[u8]) -> ETag {
        ETag(format!("\"{}\"", hex(&Sha256::digest(bytes)[..12])))
    }

    /// The tag of a file that may be replaced.
    pub(crate) fn of_file(metadata: &Metadata) -> ETag {
        let modified =
            metadata.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        let modified = modified.map_or(0, |time| time.as_nanos());
        #[cfg(unix)]
        let inode = std::os::unix::fs::MetadataExt::ino(metadata);
        #[cfg(not(unix))]
        let inode = 0;
        ETag(format!("\"{:x}-{modified:x}-{inode:x}\"", metadata.len()))
    }

    fn header(&self) -> HeaderValue {
        // Quotes, letters, digits and a few signs.
        HeaderValue::from_str(&self.0).unwrap_or(HeaderValue::from_static("\"\""))
    }

    /// Whether a list of tags in a header names this one. `*` names any.
    fn is_in(&self, headers: &HeaderMap, name: HeaderName) -> bool {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        let mut tags = values.flat_map(|value| value.split(',')).map(str::trim);
        tags.any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag) == self.0)
    }
}

/// What to send of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    /// Nothing: the client has it.
    NotModified,
    /// All of it.
    Whole,
    /// These bytes.
    Part(Range<u64>),
    /// Nothing: it has no such bytes.
    Unsatisfiable,
}

/// What a request with these headers wants of a file.
pub(crate) fn select(headers: &HeaderMap, etag: &ETag, length: u64) -> Selection {
    if headers.contains_key(header::IF_NONE_MATCH) && etag.is_in(headers, header::IF_NONE_MATCH) {
        return Selection::NotModified;
    }
    // A part of another file than the one that the client has begun is of no use to it.
    let is_same = headers.get(header::IF_RANGE).is_none_or(|value| value.as_bytes() == etag.0.as_bytes());
    let mut ranges = headers.get_all(header::RANGE).iter();
    match (ranges.next().and_then(|value| value.to_str().ok()), ranges.next()) {
        (Some(range), None) if is_same => parse_range(range, length),
        _ => Selection::Whole,
    }
}

/// A range of bytes. Several at once, other units and nonsense are ignored, as HTTP allows.
fn parse_range(text: &str, length: u64) -> Selection {
    let Some((unit, range)) = text.split_once('=') else { return Selection::Whole };
    let Some((first, last)) = range.trim().split_once('-') else { return Selection::Whole };
    if !unit.trim().eq_ignore_ascii_case("bytes") || range.contains(',') {
        return Selection::Whole;
    }
    // `parse` accepts a sign.
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = |text: &str| is_number(text).then(|| text.parse::<u64>().unwrap_or(u64::MAX));
    let range = match (number(first), number(last), first.is_empty(), last.is_empty()) {
        (Some(first), Some(last), ..) if first <= last => first..last.saturating_add(1).min(length),
        (Some(first), None, _, true) => first..length,
        (None, Some(count), true, _) => length.saturating_sub(count)..length,
        _ => return Selection::Whole,
    };
    if range.start < range.end { Selection::Part(range) } else { Selection::Unsatisfiable }
}

/// The response with what was selected; `body` makes the body of a range of bytes.
pub(crate) fn respond(
    selection: Selection,
    etag: &ETag,
    length: u64,
    media_type: &'static str,
    body: impl FnOnce(Range<u64>) -> Body,
) -> Response {
    let (status, range) = match selection {
        Selection::NotModified => (StatusCode::NOT_MODIFIED, None),
        Selection::Whole => (StatusCode::OK, Some(0..length)),
        Selection::Part(range) => (StatusCode::PARTIAL_CONTENT, Some(range)),
        Selection::Unsatisfiable => {
            let message = format!("the file has {length} bytes; the range is outside of them");
            let error = ApiError::new(ErrorCode::Range, message);
            let mut response = error.into_response();
            set(&mut response, header::CONTENT_RANGE, &format!("bytes */{length}"));
            return response;
        }
    };
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response.headers_mut().insert(header::ETAG, etag.header());
    response.headers_mut().insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(range) = range {
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(range.end - range.start));
        if status == StatusCode::PARTIAL_CONTENT {
            let value = format!("bytes {}-{}/{length}", range.start, range.end - 1);
            set(&mut response, header::CONTENT_RANGE, &value);
        }
        *response.body_mut() = body(range);
    }
    response
}

fn set(response: &mut Response, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn ranges_select_their_bytes_and_nonsense_selects_all() {
        let etag = ETag::of_name("a");
        let select = |text: &str| select(&headers(&[(header::RANGE, text)]), &etag, 10);
        for (text, range) in [
            ("bytes=0-3", 0..4),
            ("bytes=4-", 4..10),
            ("bytes=-3", 7..10),
            ("bytes=-99", 0..10),
            ("Bytes=9-9", 9..10),
            ("bytes=5-99999999999999999999999", 5..10),
        ] {
            assert_eq!(select(text), Selection::Part(range), "{text}");
        }
        for text in ["bytes=10-", "bytes=10-12", "bytes=-0", "bytes=99999999999999999999-"] {
            assert_eq!(select(text), Selection::Unsatisfiable, "{text}");
        }
        for text in
            ["bytes=3-2", "bytes=0-1,4-5", "bytes=", "bytes=-", "lines=0-3", "bytes=+1-2", "bytes=a-b", "0-3"]
        {
            assert_eq!(select(text), Selection::Whole, "{text}");
        }
        // Nothing can be selected of an empty file.
        assert_eq!(
            super::select(&headers(&[(header::RANGE, "bytes=0-")]), &etag, 0),
            Selection::Unsatisfiable
        );
    }

    #[test]
    fn a_file_that_the_client_has_is_not_sent_and_a_part_of_another_neither() {
        let etag = ETag::of_name("a");
        let select = |pairs: &[(HeaderName, &str)]| select(&headers(pairs), &etag, 10);
        for same in ["\"a\"", "W/\"a\"", "\"b\", \"a\"", "*"] {
            assert_eq!(select(&[(header::IF_NONE_MATCH, same)]), Selection::NotModified, "{same}");
        }
        for other in ["\"b\"", "a", "\"\""] {
            assert_eq!(select(&[(header::IF_NONE_MATCH, other)]), Selection::Whole, "{other}");
        }
        let range = (header::RANGE, "bytes=0-0");
        assert_eq!(select(&[range.clone(), (header::IF_RANGE, "\"a\"")]), Selection::Part(0..1));
        for other in ["\"b\"", "W/\"a\"", "Tue, 17 Nov 2026 19:00:00 GMT"] {
            assert_eq!(select(&[range.clone(), (header::IF_RANGE, other)]), Selection::Whole, "{other}");
        }
    }
}
