//! A certificate authority of the test's own, made with openssl.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The files of an authority and of the server certificate that it has signed.
pub struct OwnAuthority {
    directory: tempfile::TempDir,
}

impl OwnAuthority {
    /// `names` is the server's `subjectAltName`, for instance `IP:127.0.0.1`.
    pub fn new(names: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let files = directory.path();
        let new = "-newkey rsa:2048 -nodes -days 2";
        openssl(files, &format!("req -x509 {new} -subj /CN=authority -keyout authority.key -out authority.pem"));
        openssl(files, &format!("req {new} -subj /CN=server -keyout server.key -out server.csr"));
        std::fs::write(files.join("extensions"), format!("subjectAltName={names}")).unwrap();
        openssl(
            files,
            "x509 -req -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 \
             -extfile extensions -out server.pem",
        );
        Self { directory }
    }

    /// The directory of `server.pem` and `server.key`.
    pub fn files(&self) -> &Path {
        self.directory.path()
    }

    /// The authority's own certificate.
    pub fn certificate(&self) -> PathBuf {
        self.files().join("authority.pem")
    }
}

fn openssl(directory: &Path, args: &str) {
    let output = Command::new("openssl").args(args.split_whitespace()).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "openssl {args}: {}", String::from_utf8_lossy(&output.stderr));
}
