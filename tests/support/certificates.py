"""Certificates that live as long as a test, and where their files lie."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509  # trustme stands on it
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.rpc.security import PemFiles

LOOPBACK = ("localhost", "127.0.0.1")


class Authority:
    """Signs certificates, and has its own in a file that others trust."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca, self._folder = trustme.CA(), folder
        self.path = folder / f"{name}.pem"
        self.trust()

    def trust(self) -> None:
        """Writes its own certificate, in the place of what lies there."""
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, name: str, *identities: str, ca: Path | None = None) -> PemFiles:
        """NAME.crt and NAME.key for these names (of this machine, without any), over what lies there; `ca` is whom the
        one who shows it trusts."""
        issued = self._ca.issue_cert(*(identities or LOOPBACK))
        files = PemFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key", ca)
        assert files.cert is not None and files.key is not None
        issued.private_key_pem.write_to_path(files.key)
        files.key.chmod(0o600)
        files.cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        return files

    def issue_workload(self, name: str, *uris: str, ca: Path | None = None) -> PemFiles:
        """The same for URIs alone, as SPIFFE's authorities name workloads: no DNS name, no common name."""
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signing = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "SPIRE")]))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName(map(x509.UniformResourceIdentifier, uris)), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
            .sign(signing, hashes.SHA256())
        )
        files = PemFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key", ca)
        assert files.cert is not None and files.key is not None
        files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files
