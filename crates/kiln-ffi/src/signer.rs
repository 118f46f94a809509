//! Who signs image files.

use std::ffi::c_char;
use std::path::PathBuf;

use kiln_engine::{Credentials, KeySource};

use crate::abi::{self, SizedStruct};
use crate::handles::Table;
use crate::status::{Failure, KilnStatus, guard};

pub(crate) static SIGNERS: Table<Credentials> = Table::new("kiln_signer");

/// A key with its certificate. Any thread may use it.
pub struct KilnSigner(());

/// Who signs, and what is added to signatures. All zero but the size are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KilnSignerOptions {
    /// sizeof(kiln_signer_options).
    pub size: usize,
    /// The file of the private key, PEM in PKCS#8; NULL: that of `kiln credentials new`.
    pub key: *const c_char,
    /// The file of its certificate and of those above it, PEM; NULL exactly if `key` is.
    pub certificate: *const c_char,
    /// The name of the provider in signed files, besides the name in the certificate; NULL: none.
    pub producer: *const c_char,
    /// The address of an authority that adds a time stamp to every signature (RFC 3161); NULL: none. It is asked for one at
    /// once, and for every file that is signed.
    pub timestamp_url: *const c_char,
}

// SAFETY: `repr(C)`, the size is first, and numbers and pointers may be zero.
unsafe impl SizedStruct for KilnSignerOptions {
    const NAME: &'static str = "kiln_signer_options";
}

impl KilnSignerOptions {
    /// # Safety
    /// The texts are NULL or end in NUL.
    unsafe fn open(options: Option<&KilnSignerOptions>) -> Result<Credentials, Failure> {
        let text = |pointer: fn(&KilnSignerOptions) -> *const c_char, name: &str| match options {
            // SAFETY: promised by the caller.
            Some(options) => unsafe { abi::name(pointer(options), name) },
            None => Ok(None),
        };
        let key = text(|options| options.key, "key")?.map(PathBuf::from);
        let certificate = text(|options| options.certificate, "certificate")?.map(PathBuf::from);
        let source = match (key, certificate) {
            (Some(key), Some(certificate)) => KeySource::Files { key, certificate },
            (None, None) => KeySource::Folder(
                kiln_base::folders::credentials()
                    .ok_or_else(|| Failure::invalid("there is no data folder"))?,
            ),
            _ => return Err(Failure::invalid("a key needs its certificate, and a certificate its key")),
        };
        let producer = text(|options| options.producer, "producer")?;
        let url = text(|options| options.timestamp_url, "timestamp_url")?;
        Ok(Credentials::open(source, producer, url.as_deref())?)
    }
}

/// Opens a key and its certificate to sign files with (C2PA). One that does not fit, has expired or is for something else is
/// an error.
///
/// `options`: NULL are the defaults. `*signer` is NULL after an error; free it with kiln_signer_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_signer_open(
    options: *const KilnSignerOptions,
    signer: *mut *mut KilnSigner,
) -> KilnStatus {
    guard(|| {
        if signer.is_null() {
            return Err(Failure::invalid("the pointer for the kiln_signer is NULL"));
        }
        // SAFETY: not NULL, and the caller's to write.
        unsafe { *signer = std::ptr::null_mut() };
        // SAFETY: arguments as the header says.
        let options = unsafe { abi::read(options)? };
        // SAFETY: the texts of the options are as the header says.
        let opened = unsafe { KilnSignerOptions::open(options.as_ref())? };
        // SAFETY: as above.
        unsafe { *signer = SIGNERS.insert(opened) };
        Ok(())
    })
}

/// Frees a signer; NULL is ignored. Calls that still use it run to their end.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_signer_free(signer: *mut KilnSigner) -> KilnStatus {
    guard(|| SIGNERS.remove(signer))
}
