"""Versions of models in the forms that others load, and whether the mesh has signed them.

`dmsc model` calls it. It needs neither a mesh nor torch: safetensors are read by their headers.
It asks no gateway; `dmsc.client` fetches the files.

forms.py           the forms, by name
export.py          writes a version as one of the forms
hugging_face.py    a folder that `from_pretrained` loads
oci_layout.py      an OCI image layout with the media types of the CNCF's ModelPack
mlflow_layout.py   a folder that MLflow loads
signature_check.py whether the mesh has signed a version
"""
